"""Plans the handoff of a prompt's KV cache from its prefill worker to its decode worker."""

from __future__ import annotations

from baton.coordinator.routing.choices import DecodeChoice, Placement, PrefillChoice
from baton.coordinator.routing.loads.worker_traits import (
    block_size_of,
    handoff_bytes,
    reusable_tokens,
)
from baton.coordinator.routing.prompt_blocks import PromptBlocks
from baton.coordinator.state.requests import Request, WorkerKey
from baton.coordinator.state.workers import AttachedWorkers
from baton.runtime.kv import kv_fingerprint
from baton.runtime.prompts.sampling import needs_exact_state


class Handoffs:
    """Handoffs between the workers of one fleet.

    Args:
        workers: Workers of the fleet.
        prompts: Block hashes of prompts, and the workers that hold them.
    """

    def __init__(self, workers: AttachedWorkers, prompts: PromptBlocks) -> None:
        self._workers, self._prompts = workers, prompts

    def plan(
        self, request: Request, prefill: PrefillChoice, decode: DecodeChoice
    ) -> Placement | None:
        """Both workers with a handoff between them; None if the handoff exceeds their limits."""
        skip_tokens = self._skip_tokens(request, decode.worker)
        if not self._is_possible(request, prefill.worker, decode.worker, skip_tokens):
            return None
        return Placement(prefill, decode, skip_tokens)

    def _skip_tokens(self, request: Request, decode: WorkerKey) -> int:
        """Tokens that the handoff leaves out: whole blocks in the decode worker's cache.

        Blocks that the worker has not reported yet count as missing: it may compute them later than
        the handoff arrives, or never. The handoff never leaves out the last token, because the
        engine continues from it.
        """
        worker = self._workers.get(decode)
        assert worker is not None
        # A cached prefix of keys and values is of no use to a model with recurrent states, unless
        # the worker has the state at its end too, which the prefix index does not tell.
        if request.hands_over_all or kv_fingerprint.keeps_states(worker.hello.fingerprint):
            return 0
        block_size = block_size_of(worker.hello)
        held = self._prompts.match(request).reported_by(decode).num_device
        return min(held * block_size, reusable_tokens(request.num_prefill_tokens, block_size))

    def _is_possible(
        self, request: Request, prefill: WorkerKey, decode: WorkerKey, skip_tokens: int
    ) -> bool:
        """Whether both workers accept a handoff of this size and the receiver can continue."""
        sender, receiver = self._workers.get(prefill), self._workers.get(decode)
        assert sender is not None
        assert receiver is not None
        num_bytes = handoff_bytes(sender.hello, request.num_prefill_tokens - skip_tokens)
        if kv_fingerprint.keeps_states(receiver.hello.fingerprint) and needs_exact_state(
            request.submission.sampling
        ):
            # The receiver computes the prompt's last token again, and has the state after it only.
            return False
        return (
            num_bytes <= sender.hello.capacity.max_send_bytes
            and num_bytes <= receiver.hello.capacity.max_receive_bytes
            and receiver.can_replay(request.submission.sampling)
        )
