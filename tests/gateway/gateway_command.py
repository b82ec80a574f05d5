"""`baton gateway` as a process in front of a scripted coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path


@contextlib.asynccontextmanager
async def gateway_command(address: str, config: Path, wait_s: float) -> AsyncIterator[str]:
    """Yields the URL of a gateway; each wait for the process takes at most `wait_s`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "baton.cli", "gateway", "--coordinator", address),
        *("--config", str(config)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), wait_s)
        yield line.decode().strip().removeprefix("ready http=")
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), wait_s) == 0
