"""What requests are predicted to take: prefill work, first tokens, and where they go on sooner."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable

from baton.coordinator.routing.batch_prompts import BatchPrompts
from baton.coordinator.routing.output_lengths import OutputLengths, max_output_tokens
from baton.coordinator.routing.prefix_index import PrefixMatch
from baton.coordinator.routing.prompt_blocks import PromptBlocks
from baton.coordinator.routing.router import Router
from baton.coordinator.routing.worker_load import WorkerLoad
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.requests import Prediction, Request, Submission
from baton.coordinator.state.workers import AttachedWorkers
from baton.v1 import common_pb2


class Predictions:
    """Predicts by the fitted latency of one fleet's workers, and by what is queued there.

    It chooses nothing and changes nothing.

    Args:
        router: of these workers.
        workers: Workers of one fleet.
        prompts: cuts prompts into these workers' blocks.
        batch_prompts: batch prompts that may make room for interactive ones.
        outputs: how long outputs are.
        config: what steps cost where no worker can be asked, and which prompts are long.
    """

    def __init__(
        self,
        router: Router,
        workers: AttachedWorkers,
        prompts: PromptBlocks,
        batch_prompts: BatchPrompts,
        outputs: OutputLengths,
        config: CoreConfig,
    ) -> None:
        self._router, self._workers, self._prompts = router, workers, prompts
        self._batch_prompts, self._outputs = batch_prompts, outputs
        self._unmeasured = config.latency
        self._long_prompt_tokens = config.lanes.long_prompt_tokens

    def prefill_s(self, request: Request) -> float:
        """Seconds of prefill work in a request that is to wait."""
        entry, num_tokens = self._router.idlest_prefill(), request.num_prefill_tokens
        if entry is None:
            # What waits for the first worker is work all the same.
            return self._unmeasured_prefill_s(num_tokens)
        num_blocks = self._prompts.match(request).blocks_of(entry.key)
        return _prefill_s(entry, num_tokens, num_blocks)

    def demand(self, submission: Submission, hashes: array[int]) -> tuple[float, int, float]:
        """What a request will ask of the pools.

        Args:
            submission: the request.
            hashes: of its prompt's blocks.

        Returns:
            Seconds of prefill work, prompt tokens, and the output tokens to be expected.
        """
        num_tokens = len(submission.prompt_token_ids)
        entry = self._router.idlest_prefill()
        if entry is None:
            prefill_s = self._unmeasured_prefill_s(num_tokens)
        else:
            num_blocks = self._router.longest_prefill(self._router.match(hashes))
            prefill_s = _prefill_s(entry, num_tokens, num_blocks)
        most = max_output_tokens(submission, self._workers.max_model_len)
        return prefill_s, num_tokens, self._outputs.mean(submission.lane, most or num_tokens)

    def ttft(
        self, submission: Submission, hashes: array[int], in_lane_s: Callable[[float, int], float]
    ) -> Prediction | None:
        """How soon a request would have its first token, behind all that goes first.

        Args:
            submission: the request, which is not queued.
            hashes: of its prompt's blocks.
            in_lane_s: says how many seconds it would wait before it is given to a worker, by the
                seconds of its own work and the number of workers there are.

        Returns:
            None while no prefill worker is there.
        """
        num_workers = self._router.num_prefill_workers
        if not num_workers:
            return None
        choice = self._router.choose_prefill(
            self._router.match(hashes), len(submission.prompt_token_ids), submission.session_id
        )
        if choice is None:
            return None
        wait_s = choice.predicted_s - choice.work_s
        entry, worker = self._router.load(choice.worker), self._workers.get(choice.worker)
        if (
            submission.ordered_in(self._long_prompt_tokens) != common_pb2.LANE_BATCH
            and entry is not None
            and self._batch_prompts.give_way(entry, worker)
        ):
            wait_s = min(wait_s, entry.step_s)
        wait_s += in_lane_s(choice.work_s, num_workers)
        # Behind others it waits for whole steps, one more at worst. With half of one, the mean, a
        # full cell admitted 1.5 % that came too late.
        wait_s += min(wait_s, entry.step_s) if entry is not None else 0.0
        return Prediction(wait_s, choice.work_s)

    def at_a_prefill_worker_s(self, request: Request, match: PrefixMatch) -> float:
        """How soon a request would have its next token, could a prefill worker queue it now.

        Args:
            request: the request.
            match: of its prompt.

        Returns:
            Seconds; infinite where no prefill worker is there.
        """
        choice = self._router.choose_prefill(
            match, request.num_prefill_tokens, request.submission.session_id
        )
        return choice.predicted_s if choice is not None else math.inf

    def here_s(self, request: Request) -> float:
        """How long a decoding request needs for the rest of its output, where it is.

        Returns:
            Seconds; 0 where its worker is gone.
        """
        entry = self._router.load(request.decode) if request.decode is not None else None
        if entry is None:
            return 0.0
        most = max_output_tokens(request.submission, self._workers.max_model_len)
        num_known = len(request.token_ids)
        num_more = self._outputs.expected(request.submission.lane, most, num_known)
        return num_more * entry.itl_with_s(0, 0)

    def elsewhere_s(self, request: Request, waiting_s: float) -> float:
        """How soon a decoding request would go on, were it taken off its worker now.

        Its prompt and its known output are computed once more then.

        Args:
            request: the request.
            waiting_s: seconds of prefill work that wait in the lanes.

        Returns:
            Seconds; infinite where no prefill worker is there.
        """
        num_workers = self._router.num_prefill_workers
        queued_s = waiting_s / num_workers if num_workers else 0.0
        return self.at_a_prefill_worker_s(request, self._prompts.match(request)) + queued_s

    def _unmeasured_prefill_s(self, num_tokens: int) -> float:
        """As on a worker without a cache whose steps were not measured yet."""
        return self._unmeasured.prefill_s(max(1, num_tokens))


def _prefill_s(entry: WorkerLoad, num_tokens: int, num_cached_blocks: int) -> float:
    """What a worker needs for a prompt, seconds, with so many blocks of it in its cache."""
    num_cached = num_cached_blocks * entry.traits.block_size_tokens
    return entry.traits.latency.prefill_s(max(1, num_tokens - num_cached))
