"""Counts what each vLLM step computes, where the step is scheduled.

vLLM reports a prompt to its client only with the first token, not the chunks before it. The
connector beside the scheduler sees every step.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from baton.runtime.steps.latency import PrefillChunk


class StepWork(NamedTuple):
    """Work that one step computes, as the latency model counts it.

    Attributes:
        scheduled_at: When the step was scheduled, by time.monotonic.
        num_prefill_tokens: Prompt tokens that the step computes.
        prefill_token_squares: Sum of end^2 - done^2 over the prefill chunks (LatencyModel.step_s).
        num_decodes: Requests for which the step computes one output token.
        num_kv_tokens: Sum of the tokens that these requests attend to.
    """

    scheduled_at: float
    num_prefill_tokens: int
    prefill_token_squares: int
    num_decodes: int
    num_kv_tokens: int


def num_computed_tokens(output: Any) -> dict[str, int]:
    """Returns for each request of a step how many of its tokens are computed or loaded before.

    Args:
        output: vLLM's SchedulerOutput.
    """
    cached = output.scheduled_cached_reqs
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    return computed | dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


class StepCounter:
    """Counts steps in the order in which they are scheduled."""

    def __init__(self) -> None:
        # Tokens that were cached before a prompt's first step, for prompts of several steps.
        self._num_cached: dict[str, int] = {}
        self._num_computed: dict[str, int] = {}

    def count(self, output: Any) -> StepWork | None:
        """Returns a step's work from vLLM's SchedulerOutput; None if it computes nothing."""
        if not output.num_scheduled_tokens:
            return None
        computed = num_computed_tokens(output)
        started = {new.req_id for new in output.scheduled_new_reqs}
        started.update(output.scheduled_cached_reqs.resumed_req_ids)
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
        return StepWork(
            time.monotonic(),
            sum(chunk.num_tokens for chunk in chunks),
            sum(chunk.token_squares for chunk in chunks),
            num_decodes,
            num_kv_tokens,
        )

    def num_computed(self, request_id: str) -> int:
        """Returns a request's computed tokens, including drafts that may be rejected."""
        return self._num_computed.get(request_id, 0)

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        self._num_cached.pop(request_id, None)
        self._num_computed.pop(request_id, None)
