"""What vLLM's ranks run to record themselves: vLLM's own profiler, without its table."""

from __future__ import annotations

from typing import Any


class Recording:
    """Mixed into vLLM's workers (`worker_extension_cls`), to be called by collective_rpc."""

    # vLLM's own.
    profiler: Any
    profile: Any

    def baton_record(self, is_start: bool) -> None:
        """Begins to record, or ends it and writes the trace."""
        self.profile(is_start)
        if is_start:
            # Which CPU ranks make whatever is configured: it takes them ten times as long as the
            # trace, and requests wait meanwhile.
            self.profiler.dump_cpu_time_total = False
