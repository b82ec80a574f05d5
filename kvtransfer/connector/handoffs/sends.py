"""Decides which blocks of a prompt each step saves; runs beside vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.kvtransfer.connector.handoffs.handoff_step import Part, Save
from baton.kvtransfer.connector.step_work import num_computed_tokens
from baton.kvtransfer.engine_port import EnginePort
from baton.kvtransfer.handoff_orders import SendHandoff
from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv.kv_groups import KvGroup

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(slots=True)
class _Send:
    """A request whose blocks are saved.

    Attributes:
        handoff_id: ID of the handoff, 16 bytes.
        offset: Where the handoff's bytes begin in the segment.
        num_tokens: Number of prompt tokens that the handoff covers, from the prompt's first.
        skip_tokens: Number of tokens at the beginning that the handoff leaves out.
        num_blocks: Size of the handoff.
        next_blocks: For each block table, the index in the prompt of the next block to save. It
            never goes back: saved blocks stay right when the request is preempted.
        end_blocks: For each block table, the index of the block after the last one to save.
        has_saved: Whether a step has saved some blocks.
    """

    handoff_id: bytes
    offset: int
    num_tokens: int
    skip_tokens: int
    num_blocks: int
    next_blocks: list[int]
    end_blocks: list[int]
    has_saved: bool = False


class Sends:
    """The requests that hand over their KV cache; HandoffScheduler owns this object.

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

    def add(self, request_id: str, order: SendHandoff) -> None:
        """Adds a request with a send.

        Args:
            request_id: vLLM's ID of the request.
            order: The handoff that the request sends.
        """
        skip_tokens, num_tokens = order.skip_tokens, order.num_tokens
        num_blocks = self._layout.num_blocks(num_tokens - skip_tokens)
        held = [
            (self._layout.blocks(table, num_blocks), _skipped_blocks(table, skip_tokens))
            for table in self._layout.tables
        ]
        self._sends[request_id] = _Send(
            order.handoff_id,
            order.offset,
            num_tokens,
            skip_tokens,
            num_blocks,
            [skipped + blocks.start for blocks, skipped in held],
            [skipped + blocks.stop for blocks, skipped in held],
        )

    def finished(self, request_id: str) -> None:
        """Takes the end of a request; gives its handoff up unless all blocks were saved."""
        send = self._sends.pop(request_id, None)
        if send is not None and send.next_blocks != send.end_blocks:
            self._give_up(send)

    def leave(self, request_id: str) -> bool:
        """Forgets the send of a request that ends before it runs; Baton's engine keeps the handoff.

        Returns:
            Whether the request has saved nothing, so that another request can use the handoff.
        """
        send = self._sends.get(request_id)
        if send is not None and send.has_saved:
            return False
        self._sends.pop(request_id, None)
        return True

    def saves(self, output: SchedulerOutput, unverified: Set[int]) -> Iterator[Save]:
        """Yields the blocks that a step finishes, one save per request.

        The engine keeps every block of a handoff until the step that saves it: it drops a window's
        blocks only when no later token of the prompt needs them. If a block were gone (NULL_BLOCK)
        nevertheless, the request would give its handoff up.

        Args:
            output: The step.
            unverified: Blocks whose content may turn out wrong, which the decode worker could not
                detect. A request with such a block saves nothing in this step.
        """
        computed = num_computed_tokens(output)
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            if (send := self._sends.get(request_id)) is None:
                continue
            num_tokens = computed[request_id] + num_scheduled
            ready = self._ready(send, num_tokens)
            if ready == send.next_blocks:
                continue
            tables = output.kv_connector_block_state.get_block_ids(request_id)
            if any(not unverified.isdisjoint(block_ids) for block_ids in tables):
                # A later step saves these blocks too. Without one, the handoff is given up.
                continue
            parts = tuple(self._parts(send, tables, ready))
            # A state belongs to the last computed token, which must be the handoff's.
            is_wrong = self._layout.has_states and num_tokens > send.num_tokens
            if is_wrong or not all(all(part.block_ids) for part in parts):
                self._give_up(self._sends.pop(request_id))
                continue
            send.next_blocks, send.has_saved = ready, True
            yield Save(
                send.handoff_id,
                send.offset,
                send.num_blocks,
                parts,
                last=ready == send.end_blocks,
            )

    def _ready(self, send: _Send, num_tokens: int) -> list[int]:
        """Returns for each table the block after the last one that is complete or saved.

        Blocks from the prefix cache never pass through the model; the first save includes them.
        """
        if num_tokens >= send.num_tokens:
            return send.end_blocks
        return [
            next_block
            if table.kind == "state"
            else max(next_block, min(end, num_tokens // table.block_size_tokens))
            for table, next_block, end in zip(
                self._layout.tables, send.next_blocks, send.end_blocks, strict=True
            )
        ]

    def _parts(
        self, send: _Send, tables: Sequence[Sequence[int]], ready: Sequence[int]
    ) -> Iterator[Part]:
        """Yields for each table the blocks from the next one to save on."""
        for table, block_ids, first, end in zip(
            self._layout.tables, tables, send.next_blocks, ready, strict=True
        ):
            skipped = _skipped_blocks(table, send.skip_tokens)
            if table.kind == "state":
                at = (send.num_tokens - 1) // table.block_size_tokens
                yield Part(0, list(block_ids[at : at + end - first]))
            else:
                yield Part(first - skipped, list(block_ids[first:end]))

    def take_given_up(self) -> list[bytes]:
        """Returns incomplete handoffs that get no more saves, for the step that is being made."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _give_up(self, send: _Send) -> None:
        self._port.abort_send(send.handoff_id)
        self._given_up.append(send.handoff_id)


def _skipped_blocks(table: KvGroup, skip_tokens: int) -> int:
    """Returns the number of a table's blocks that a handoff leaves out; never a state."""
    return 0 if table.kind == "state" else skip_tokens // table.block_size_tokens
