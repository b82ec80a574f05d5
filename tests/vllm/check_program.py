"""Runs `baton check` several times in one process, because the import of vLLM takes long."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

from huggingface_hub import constants

from baton.cli.main import main as baton
from baton.kvtransfer import transport_speed


def main(commands: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """Returns exit code, standard output and standard error of each command, by its name."""
    # The fork server has imported the library, which read HF_HUB_OFFLINE then.
    constants.HF_HUB_OFFLINE = True
    _measure_networks_once()
    return {name: _run(arguments) for name, arguments in commands.items()}


def _measure_networks_once() -> None:
    """Measures transports that start slowly for the first model only."""
    measure, measured = transport_speed.measure, dict[str, transport_speed.Speed]()

    async def measure_once(transport: str, *arguments: Any) -> transport_speed.Speed:
        if transport not in measured or transport == "shm":
            measured[transport] = await measure(transport, *arguments)
        return measured[transport]

    transport_speed.measure = measure_once


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
