"""Runs vLLM's own profiler in a rank, without the table that vLLM would write."""

from __future__ import annotations

from typing import Any


class Recording:
    """Mixed into vLLM's workers (`worker_extension_cls`); Baton calls it by collective_rpc."""

    # vLLM's own profiler.
    profiler: Any
    profile: Any

    def baton_record(self, is_start: bool) -> None:
        """Starts recording, or ends it and writes the trace."""
        self.profile(is_start)
        if is_start:
            # Skip the table: CPU ranks write it whatever the configuration says, it takes ten times
            # as long as the trace, and requests wait meanwhile.
            self.profiler.dump_cpu_time_total = False
