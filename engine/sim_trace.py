"""Profile of the simulated engine's steps as Chrome trace events, like torch's profiler."""

from __future__ import annotations

import json
import os
from pathlib import Path

# Most steps of a profile; further steps are left out.
_MAX_STEPS = 200_000


class StepTrace:
    """Records steps. A simulated step has no parts that could be recorded."""

    def __init__(self) -> None:
        self._events: list[dict[str, object]] = []

    def step(
        self,
        started_at: float,
        ended_at: float,
        *,
        num_prefill_tokens: int,
        num_decodes: int,
        num_kv_tokens: int,
    ) -> None:
        """Adds a step; times in seconds, by time.monotonic."""
        if len(self._events) >= _MAX_STEPS:
            return
        self._events.append(
            {
                "name": f"prefill of {num_prefill_tokens} tokens, {num_decodes} decodes",
                "cat": "simulated_step",
                "ph": "X",
                "ts": started_at * 1e6,
                "dur": (ended_at - started_at) * 1e6,
                "pid": os.getpid(),
                "tid": 0,
                "args": {
                    "prefill tokens": num_prefill_tokens,
                    "decodes": num_decodes,
                    "KV tokens": num_kv_tokens,
                },
            }
        )

    def write(self, path: Path) -> None:
        trace = {"engine": "simulated", "displayTimeUnit": "ms", "traceEvents": self._events}
        path.write_text(json.dumps(trace), encoding="utf-8")
