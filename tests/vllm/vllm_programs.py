"""Programs of this folder that work on cases beside the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import vllm_cases as cases

from baton.runtime import affinity
from baton.runtime.closing import Closing

HERE = Path(__file__).parent
TIMEOUT_S = 500


class Program(Closing):
    """One at work, from its beginning on: cases in on stdin, what came of them out to a file."""

    def __init__(self, program: str, *arguments: str, given: Any, directory: Path) -> None:
        self._output, self._log = directory / f"{program}.json", directory / f"{program}.log"
        cases_in = directory / f"{program}.in"
        cases_in.write_text(json.dumps(given))
        # What may bind this process's engines is not for others.
        environment = {k: v for k, v in os.environ.items() if k != affinity.VLLM_BIND_THREADS}
        with cases_in.open() as stdin, self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / program), *arguments, str(self._output)],
                stdin=stdin,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def result(self) -> Any:
        """Waits for what it writes."""
        code = self._process.wait(timeout=TIMEOUT_S)
        assert code == 0, self._log.read_text()[-3000:]
        return json.loads(self._output.read_text())


class PlainVllm(Program):
    """One plain vLLM, which answers cases one at a time.

    Args:
        model: a local directory.
        given: see vllm_reference.py.
        directory: for its files.
    """

    def __init__(self, model: str, given: dict[str, Any], directory: Path) -> None:
        super().__init__("vllm_reference.py", model, given=given, directory=directory)

    def result(self) -> list[cases.Case]:
        """The cases with what it answers, once it has answered all."""
        made: list[cases.Case] = super().result()
        return made
