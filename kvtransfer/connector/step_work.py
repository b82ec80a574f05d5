"""What a vLLM step computes, counted where it is scheduled.

vLLM tells its client of a prompt only with its first token, and nothing of the chunks before. The
connector beside the scheduler sees each step whole.
"""

from __future__ import annotations

import time
from typing import Any

from baton.runtime.latency import PrefillChunk

# Of SchedulerStats.kv_connector_stats: [scheduled_at (monotonic), num_prefill_tokens,
# prefill_token_squares, num_decodes, num_kv_tokens], as in engine/base.py's StepSample.
STEP_WORK = "baton_step"


class StepCounter:
    """Counts steps in the order in which they are scheduled."""

    def __init__(self) -> None:
        # Of requests whose prompt takes several steps: tokens that were there before the first.
        self._num_cached: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}

    def count(self, output: Any) -> list[float] | None:
        """The work of one step, vLLM's SchedulerOutput; None for one that computes nothing."""
        if not output.num_scheduled_tokens:
            return None
        cached = output.scheduled_cached_reqs
        started = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id in cached.resumed_req_ids:
            started[request_id] = computed[request_id]
        computed |= started
        chunks: list[PrefillChunk] = []
        num_decodes = num_kv_tokens = 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            num_computed = computed[request_id]
            self._num_computed[request_id] = num_computed + num_tokens
            num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            if num_computed and num_tokens - num_drafts == 1:
                num_decodes += 1
                num_kv_tokens += num_computed + 1
                continue
            if request_id in started:
                self._num_cached[request_id] = num_computed
            num_done = num_computed - self._num_cached.get(request_id, 0)
            chunks.append(PrefillChunk(max(0, num_done), num_tokens))
        return [
            time.monotonic(),
            sum(chunk.num_tokens for chunk in chunks),
            sum(chunk.token_squares for chunk in chunks),
            num_decodes,
            num_kv_tokens,
        ]

    def num_computed(self, request_id: str) -> int:
        """Of a request's tokens, with the steps counted; drafts that may be refused too."""
        return self._num_computed.get(request_id, 0)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._num_cached.pop(request_id, None)
        self._num_computed.pop(request_id, None)
