"""Profiles vLLM's ranks with torch's profiler, which vLLM runs in each rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from baton.engine.base import EngineDead, NoProfiler, Trace

# Pattern of the names that vLLM gives to traces.
_TRACE_RANK = re.compile(r"(?:^|_)rank(\d+)\.\d+\.pt\.trace\.json$")


class VllmProfiler:
    """Starts and stops the profilers of all ranks, and collects their traces.

    Args:
        core: vLLM's engine core client.
        traces: Directory that ranks write into.
    """

    def __init__(self, core: Any, traces: Path) -> None:
        self._core, self._traces = core, traces

    async def start(self) -> None:
        """Starts recording.

        Raises:
            EngineDead: vLLM has died.
            NoProfiler: vLLM cannot profile on this machine.
        """
        # Remove traces of an earlier recording in which another rank failed.
        for left in self._traces.glob("*"):
            left.unlink()
        try:
            await self._record(True)
        except EngineDead:
            raise
        except Exception as error:
            raise NoProfiler(f"vLLM cannot profile: {' '.join(str(error).split())}") from error

    async def stop(self) -> Sequence[Trace]:
        """Ends the recording; returns one trace per rank, in order of ranks.

        Raises:
            EngineDead: vLLM has died.
            Exception: A rank failed.
        """
        await self._record(False)
        found = [(_TRACE_RANK.search(path.name), path) for path in self._traces.glob("*")]
        traces = [Trace(int(name[1]), path) for name, path in found if name is not None]
        return sorted(traces, key=lambda trace: trace.rank)

    async def _record(self, is_start: bool) -> None:
        try:
            await self._core.collective_rpc_async("baton_record", None, (is_start,))
        except EngineDeadError as error:
            raise EngineDead(str(error)) from error
