"""The needs of a request that placements depend on: its lane, and the tokens of its output."""

from __future__ import annotations

import math
from typing import NamedTuple

from baton.coordinator.routing.loads.kv_forecast import KvForecast
from baton.coordinator.routing.output_lengths import OutputLengths, max_output_tokens
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.lanes import Lane
from baton.coordinator.state.requests import Request, SessionKey, Submission
from baton.coordinator.state.workers import AttachedWorkers
from baton.v1 import common_pb2

# Batch requests join interactive requests while steps take at most this share of the ITL target.
# They are parked when steps exceed the whole target. The two limits differ, so that a batch request
# is not placed and parked again and again.
_JOIN_SHARE = 0.9


class DecodeNeeds(NamedTuple):
    """The needs of a request on its decode worker.

    Attributes:
        num_tokens: tokens of the prompt and of the output generated so far.
        num_output_tokens: expected number of further output tokens.
        max_itl_s: desired maximum step time on a worker that also runs other requests.
        is_batch: whether it is a batch request.
        session: the session; None means no session.
    """

    num_tokens: int
    num_output_tokens: int
    max_itl_s: float = math.inf
    is_batch: bool = False
    session: SessionKey | None = None


class RequestNeeds:
    """Finds the needs of the requests of one fleet.

    Args:
        config: Source of the ITL target and of the long-prompt limit.
        workers: The fleet's workers.
        outputs: Prediction of output lengths.
    """

    def __init__(
        self, config: CoreConfig, workers: AttachedWorkers, outputs: OutputLengths
    ) -> None:
        self._workers, self._outputs = workers, outputs
        self._long_prompt_tokens = config.lanes.long_prompt_tokens
        self._itl_target_s = config.lanes.interactive.itl_ms / 1e3

    def prompt_lane(self, submission: Submission) -> Lane:
        """The lane that the request's prompt is computed in."""
        return submission.ordered_in(self._long_prompt_tokens)

    def most_output_tokens(self, submission: Submission) -> int:
        """Limit of the whole output in tokens, see max_output_tokens."""
        return max_output_tokens(submission, self._workers.max_model_len)

    def mean_output_tokens(self, submission: Submission) -> float:
        """Mean length of the whole outputs of requests like this one."""
        most = self.most_output_tokens(submission)
        return self._outputs.mean(submission.lane, most or len(submission.prompt_token_ids))

    def more_output_tokens(self, request: Request) -> int:
        """Expected number of further output tokens; at least 1."""
        submission = request.submission
        return self._outputs.expected(
            submission.lane, self.most_output_tokens(submission), len(request.token_ids)
        )

    def mean_tokens(self, request: Request) -> int:
        """KV tokens that requests like this one have on average while they decode."""
        submission = request.submission
        mean = self._outputs.mean_of_running(submission.lane, self.most_output_tokens(submission))
        return request.num_tokens + round(mean / 2)

    def kv_forecast(self, request: Request) -> KvForecast:
        """Forecasts the KV tokens of the request while it decodes."""
        submission, num_output = request.submission, len(request.token_ids)
        goes_on = self._outputs.goes_on(
            submission.lane, self.most_output_tokens(submission), num_output
        )
        return KvForecast.of(request.num_tokens, goes_on)

    def decode(self, request: Request) -> DecodeNeeds:
        """The needs of the request's output, with the limit of a step in a cell of fixed roles."""
        submission = request.submission
        is_batch, max_itl_s = submission.lane == common_pb2.LANE_BATCH, math.inf
        if is_batch:
            max_itl_s = self._itl_target_s * _JOIN_SHARE
        elif submission.slo_itl_s is not None:
            max_itl_s = submission.slo_itl_s
        return DecodeNeeds(
            request.num_tokens,
            self.more_output_tokens(request),
            max_itl_s,
            is_batch,
            submission.session,
        )

    @staticmethod
    def may_fetch(request: Request) -> bool:
        """Whether the prefill worker may fetch the prompt's beginning from another worker.

        It may not for prompt logprobs, for which engines compute whole prompts, and not for images,
        because the holder has no images from which it could compute blocks that it lacks.
        """
        submission = request.submission
        computes_all, has_images = submission.computes_whole_prompt, bool(submission.images)
        return not (request.suspect or has_images or computes_all)
