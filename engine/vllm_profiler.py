"""Recording what vLLM's ranks do, by torch's profiler, which vLLM runs in each of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from baton.engine.base import EngineDead, NoProfiler, Trace

# As vLLM names traces.
_TRACE_RANK = re.compile(r"(?:^|_)rank(\d+)\.\d+\.pt\.trace\.json$")


class VllmProfiler:
    """Starts and stops the profilers of all ranks, and finds what they have written.

    Args:
        core: vLLM's engine core client.
        traces: directory that ranks write into.
        extended: whether vLLM's workers have Baton's extension (vllm_config.RECORDING). Another
            extension may take its place; vLLM's own method, used then, also writes a table.
    """

    def __init__(self, core: Any, traces: Path, *, extended: bool) -> None:
        self._core, self._traces = core, traces
        self._method = "baton_record" if extended else "profile"

    async def start(self) -> None:
        """Begins to record.

        Raises:
            EngineDead: vLLM has died.
            NoProfiler: vLLM cannot profile here.
        """
        # What ranks left when another one could not write.
        for left in self._traces.glob("*"):
            left.unlink()
        try:
            await self._record(True)
        except EngineDead:
            raise
        except Exception as error:
            raise NoProfiler(f"vLLM cannot profile: {' '.join(str(error).split())}") from error

    async def stop(self) -> Sequence[Trace]:
        """Ends the recording, and returns one trace per rank, by rank.

        Raises:
            EngineDead: vLLM has died.
            Exception: what went wrong in a rank.
        """
        await self._record(False)
        found = [(_TRACE_RANK.search(path.name), path) for path in self._traces.glob("*")]
        traces = [Trace(int(name[1]), path) for name, path in found if name is not None]
        return sorted(traces, key=lambda trace: trace.rank)

    async def _record(self, is_start: bool) -> None:
        try:
            await self._core.collective_rpc_async(self._method, None, (is_start,))
        except EngineDeadError as error:
            raise EngineDead(str(error)) from error
