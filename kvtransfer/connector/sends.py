"""Which blocks of a prompt each step pushes to the decode worker; beside vLLM's scheduler."""

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
        handoff_id: of its handoff.
        offset: of the handoff's bytes in the segment.
        num_tokens: how many tokens the prompt has.
        skip_blocks: how many blocks at its beginning the handoff leaves out.
        next_block: the block of the prompt that is pushed next.
    """

    handoff_id: bytes
    offset: int
    num_tokens: int
    skip_blocks: int
    next_block: int


class Sends:
    """The requests that hand over their KV cache, and how far each has been pushed.

    Args:
        port: the scheduler's, to the transfer service.
        layout: of the cache.
    """

    def __init__(self, port: EnginePort, layout: KvLayout) -> None:
        self._port, self._layout = port, layout
        self._sends: dict[str, _Send] = {}
        # Handoffs that were given up since the last step was made.
        self._given_up: list[bytes] = []

    def __len__(self) -> int:
        return len(self._sends)

    def add(self, request_id: str, params: Mapping[str, Any]) -> None:
        """A request is to be handed over.

        Args:
            request_id: the engine's.
            params: `baton_send` of its kv_transfer_params.
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
        """A request is over: its handoff is given up unless all of it was pushed."""
        send = self._sends.pop(request_id, None)
        if send is not None and send.next_block < self._layout.num_blocks(send.num_tokens):
            self._give_up(send)

    def pushes(self, output: SchedulerOutput, unverified: Set[int]) -> Iterator[Push]:
        """The blocks that a step finishes, one push for each request.

        Args:
            output: the step.
            unverified: blocks whose content may turn out wrong once steps have ended. A request
                that has one is not handed over: the decode worker would take it for right.
        """
        cached = output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            if (send := self._sends.get(request_id)) is None:
                continue
            num_blocks = self._layout.num_blocks(send.num_tokens)
            num_tokens = computed[request_id] + num_scheduled
            # Blocks from the prefix cache never pass through the model: they go with the first.
            num_ready = (
                num_blocks
                if num_tokens >= send.num_tokens
                else num_tokens // self._layout.block_size_tokens
            )
            if num_ready <= send.next_block:
                continue
            block_ids = output.kv_connector_block_state.get_block_ids(request_id)[0]
            if not unverified.isdisjoint(block_ids):
                self._give_up(self._sends.pop(request_id))
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
        """Handoffs that get no more pushes and were not complete, for the step that is made."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _give_up(self, send: _Send) -> None:
        self._port.abort_send(send.handoff_id)
        self._given_up.append(send.handoff_id)
