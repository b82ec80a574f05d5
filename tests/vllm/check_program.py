"""Runs `baton check` several times in one process, because the import of vLLM takes long."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

from huggingface_hub import constants

from baton.cli.main import main as baton


def main(commands: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Returns exit code, standard output and standard error of each command, by its name."""
    # The fork server has imported the library, which read HF_HUB_OFFLINE then.
    constants.HF_HUB_OFFLINE = True
    return {name: _run(arguments) for name, arguments in commands.items()}


def _run(arguments: list[str]) -> dict[str, Any]:
    sys.argv = ["baton", "check", *arguments]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    code: Any = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            baton()
        except SystemExit as ended:
            code = ended.code or 0
    return {"code": code, "out": _text(out), "err": _text(err)}


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()
