"""Plans the steps of a scheduler: measures each step, and asks the policy for the next one.

The policy is runtime/steps/step_budget.py. This module keeps the policy's state between steps: the
fitted latency model of this engine, the pace of each stream, and the size of the largest measured
step. It does not depend on vLLM.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from baton.kvtransfer.connector.step_work import StepWork
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.latency_fit import LatencyFit
from baton.runtime.steps.step_budget import Prompt, StepTargets, StreamPace, Streams, prompt_tokens
from baton.v1 import cluster_pb2

# Prompt tokens of the first measured step. A prior for a GPU would give a CPU steps of seconds.
_FIRST_TOKENS = 64
# A step has at most this many times the prompt tokens of the largest measured step.
_GROWTH = 4
# One in _SHORT_INTERVAL of the steps shorter than _SHORT_S seconds is measured, because the fit
# takes some 60 us per step.
_SHORT_S, _SHORT_INTERVAL = 4e-3, 4
# Longest step of a warm-up.
_UNLIMITED_S = 3600.0
# Steps between two clean-ups of the streams that have ended.
_CLEAN_INTERVAL = 256


class StepPlanner:
    """Plans the steps of one engine, in order.

    Args:
        prior: Latency model until steps are measured.
        read_targets: Returns the current targets.
    """

    def __init__(self, prior: LatencyModel, read_targets: Callable[[], StepTargets]) -> None:
        self._fit = LatencyFit(prior)
        self._read_targets = read_targets
        self.targets = read_targets()
        self._most_measured = 0
        self._num_steps = 0
        self._ended_at = 0.0
        self._paces: dict[str, StreamPace] = {}
        # Steps without an end so far, in their order: the step, its work and its predicted time.
        self._under_way: deque[tuple[object, StepWork | None, float]] = deque()

    @property
    def model(self) -> LatencyModel:
        """The current latency model."""
        return self._fit.model

    def begin(self, now: float, running: Collection[str]) -> None:
        """Begins the plan of one step.

        Args:
            now: The time, by time.monotonic.
            running: Requests of the engine.
        """
        self.targets = self._read_targets()
        busy_s = sum(step_s for _, _, step_s in self._under_way)
        self._begins_at = max(now, self._ended_at + busy_s)
        self._num_steps += 1
        if self._num_steps % _CLEAN_INTERVAL == 0:
            self._paces = {name: one for name, one in self._paces.items() if name in running}

    def pace(
        self, name: str, num_tokens: int, waited_s: float = 0.0, itl_s: float | None = None
    ) -> StreamPace:
        """Returns how a stream compares with its ITL target when the step begins.

        Args:
            name: The stream's request.
            num_tokens: Its output tokens, including those of the steps under way.
            waited_s: Seconds from its latest token until now, if another worker has made that
                token; used only when the stream is new.
            itl_s: ITL target that the request named, in seconds; None: the worker's applies.
        """
        pace = self._paces.get(name)
        if pace is None:
            begin = self._begins_at - waited_s
            pace = self._paces[name] = StreamPace(begin, num_tokens, itl_s)
        pace.advance(self.targets, self._begins_at, num_tokens)
        return pace

    def tokens(
        self,
        streams: Streams,
        prompts: Sequence[Prompt],
        max_tokens: int,
        *,
        limit: bool = True,
        share: float = 1.0,
    ) -> list[int]:
        """Number of tokens of each prompt in the step; see `prompt_tokens`.

        Args:
            streams: The streams that decode in it.
            prompts: In the order of `prompt_order`.
            max_tokens: Most tokens of a step, those of the streams included.
            limit: Whether the step is limited; False for steps of the warm-up, which are not
                measured.
            share: As in `prompt_tokens`.
        """
        if limit:
            most = max(_FIRST_TOKENS, _GROWTH * self._most_measured)
            max_tokens = min(max_tokens, streams.num_tokens + most)
            targets = self.targets
        else:
            targets = replace(self.targets, prompt_step_s=_UNLIMITED_S)
            streams = streams._replace(limit_s=math.inf)
        return prompt_tokens(self.model, targets, streams, prompts, max_tokens, share)

    def made(self, step: object, work: StepWork | None) -> None:
        """Records that the planned step was scheduled.

        Args:
            step: Identifies the step for `ended`.
            work: The step's work; None: its time says nothing about the model.
        """
        step_s = 0.0
        if work is not None:
            step_s = self.model.mixed_step_s(
                work.num_prefill_tokens,
                work.prefill_token_squares,
                work.num_decodes,
                work.num_kv_tokens,
            )
        self._under_way.append((step, work, step_s))

    def ended(self, step: object, now: float) -> None:
        """Records the end of a step; `now` is by time.monotonic.

        Steps end in their order. Earlier steps that have not ended never will.
        """
        began_at, self._ended_at = self._ended_at, now
        work = None
        while self._under_way:
            oldest, work, _ = self._under_way.popleft()
            if oldest is step:
                break
        if work is None:
            return
        # The step may have been scheduled while the previous one ran.
        duration_s = now - max(work.scheduled_at, began_at)
        is_larger = work.num_prefill_tokens > self._most_measured
        if duration_s <= 0 or (
            duration_s < _SHORT_S and self._num_steps % _SHORT_INTERVAL and not is_larger
        ):
            return
        self._most_measured = max(self._most_measured, work.num_prefill_tokens)
        self._fit.observe(
            cluster_pb2.StepSample(
                num_prefill_tokens=work.num_prefill_tokens,
                num_decodes=work.num_decodes,
                num_kv_tokens=work.num_kv_tokens,
                duration_us=round(duration_s * 1e6),
                prefill_token_squares=work.prefill_token_squares,
            )
        )
