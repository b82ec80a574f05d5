"""Decides which blocks of a prompt each step pushes; runs beside vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baton.kvtransfer.connector.handoff_step import Push
from baton.kvtransfer.control import EnginePort
from baton.kvtransfer.layout import KvLayout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(slots=True)
class _Send:
    """A request whose blocks are pushed.

    Attributes:
        handoff_id: ID of the handoff, 16 bytes.
        offset: Where the handoff's bytes begin in the segment.
        num_tokens: Number of prompt tokens that the handoff covers.
        skip_blocks: Number of blocks at the beginning that the handoff leaves out.
        next_block: Index in the prompt of the next block to push. It never goes back: pushed blocks
            stay right when the request is preempted.
    """

    handoff_id: bytes
    offset: int
    num_tokens: int
    skip_blocks: int
    next_block: int


class Sends:
    """The requests that hand over their KV cache; the scheduler's half owns this object.

    Args:
        port: The scheduler's connection to the transfer service.
        layout: Layout of the KV cache.
    """

    def __init__(self, port: EnginePort, layout: KvLayout) -> None:
        self._port, self._layout = port, layout
        self._sends: dict[str, _Send] = {}
        # Handoffs that were given up since the last step was made.
        self._given_up: list[bytes] = []

    def __len__(self) -> int:
        return len(self._sends)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sends

    def add(self, request_id: str, params: Mapping[str, Any]) -> None:
        """Adds a request with a send.

        Args:
            request_id: The engine's request ID.
            params: `baton_send` of the request's kv_transfer_params.
        """
        skip_blocks = params["skip_tokens"] // self._layout.block_size_tokens
        self._sends[request_id] = _Send(
            bytes.fromhex(params["handoff_id"]),
            params["offset"],
            params["num_tokens"],
            skip_blocks,
            next_block=skip_blocks,
        )

    def finished(self, request_id: str) -> None:
        """Takes the end of a request; gives its handoff up unless all blocks were pushed."""
        send = self._sends.pop(request_id, None)
        if send is not None and send.next_block < self._layout.num_blocks(send.num_tokens):
            self._give_up(send)

    def pushes(self, output: SchedulerOutput, unverified: Set[int]) -> Iterator[Push]:
        """Yields the blocks that a step finishes, one push per request.

        Args:
            output: The step.
            unverified: Blocks whose content may turn out wrong, which the decode worker could not
                detect. A request with such a block pushes nothing in this step.
        """
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            if (send := self._sends.get(request_id)) is None:
                continue
            num_blocks = self._layout.num_blocks(send.num_tokens)
            num_tokens = computed[request_id] + num_scheduled
            # Blocks from the prefix cache never pass through the model; the first push includes
            # them.
            num_ready = (
                num_blocks
                if num_tokens >= send.num_tokens
                else num_tokens // self._layout.block_size_tokens
            )
            if num_ready <= send.next_block:
                continue
            block_ids = output.kv_connector_block_state.get_block_ids(request_id)[0]
            if not unverified.isdisjoint(block_ids):
                # A later step pushes these blocks too. Without one, the handoff is given up.
                continue
            first, send.next_block = send.next_block, num_ready
            yield Push(
                send.handoff_id,
                send.offset,
                first - send.skip_blocks,
                num_blocks - send.skip_blocks,
                list(block_ids[first:num_ready]),
                last=num_ready == num_blocks,
            )

    def take_given_up(self) -> list[bytes]:
        """Returns incomplete handoffs that get no more pushes, for the step that is being made."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _give_up(self, send: _Send) -> None:
        self._port.abort_send(send.handoff_id)
        self._given_up.append(send.handoff_id)
