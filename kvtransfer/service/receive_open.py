"""Opens of incoming handoffs: which are refused, and how an epoch of the others begins."""

from __future__ import annotations

from collections.abc import Callable

from google.protobuf.message import DecodeError

from baton.kvtransfer.errors import MalformedFrame
from baton.kvtransfer.frames import MAX_OPEN_BYTES, Frame, verify
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.service.receive_state import (
    SENDER_AT_WORK,
    Handoff,
    ReceiveState,
    ShardProgress,
)
from baton.kvtransfer.service.receive_table import ReceiveTable
from baton.kvtransfer.transports.negotiation import Choice
from baton.runtime.kv import kv_fingerprint
from baton.v1 import kv_transfer_pb2 as pb

_S = ReceiveState
# Largest number of transports in an open. Baton has fewer transports.
MAX_OFFERS = 16


class OpenHandler:
    """Takes the open frames that reach a receiver.

    Args:
        table: The receiver's handoffs.
        choose: Takes one of an open's offers for a stream; raises MalformedFrame when the service
            can use none of them.
    """

    def __init__(
        self, table: ReceiveTable, choose: Callable[[int, pb.HandoffOpen], Choice]
    ) -> None:
        self._table, self._choose = table, choose

    def handle(self, stream: int, frame: Frame, layout: KvLayout, now: float) -> None:
        """Begins an epoch of a handoff, or refuses it."""
        if self._is_refused(stream, frame, now):
            return
        live = self._table.live.get(frame.handoff_id)
        try:
            opened = _parse_open(frame)
            sent = _sent_layout(opened, layout)
            num_bytes = self._checked_bytes(opened, sent, live)
            choice = self._choose(stream, opened)
        except MalformedFrame as error:
            self._table.reject(stream, frame, live, error.reason, str(error), now)
        else:
            self._begin(stream, opened, choice, num_bytes, sent, now)

    def _is_refused(self, stream: int, frame: Frame, now: float) -> bool:
        """Refuses an open that must not change the handoff it names; returns whether it did."""
        handoff_id, epoch = frame.handoff_id, frame.epoch
        carried = self._table.streams.get(stream, handoff_id)
        live = self._table.live.get(handoff_id)
        if carried != handoff_id:
            detail = f"the stream carries handoff {carried.hex()}; one stream carries one handoff"
            self._table.refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_MALFORMED, detail)
        elif (why := self._table.end_reason(handoff_id)) is not None:
            self._table.refuse(stream, handoff_id, epoch, *why)
        elif live is None:
            return False
        elif live.state is _S.CLAIMED:
            reason = pb.REFUSAL_REASON_UNKNOWN_HANDOFF
            self._table.refuse(stream, handoff_id, epoch, reason, "it is being loaded")
        elif epoch <= live.epoch:
            detail = f"epoch is {epoch}; epoch {live.epoch} is open"
            if live.stream == stream and epoch == live.epoch and live.state in SENDER_AT_WORK:
                self._table.fail(live, pb.REFUSAL_REASON_MALFORMED, detail, now)
            else:
                self._table.refuse(stream, handoff_id, epoch, pb.REFUSAL_REASON_OLD_EPOCH, detail)
        else:
            return False
        return True

    def _checked_bytes(self, opened: pb.HandoffOpen, layout: KvLayout, live: Handoff | None) -> int:
        """Returns the size of a handoff in bytes; raises MalformedFrame when it cannot be taken."""
        num_bytes = layout.handoff_bytes(opened.num_blocks)
        most = opened.num_blocks * layout.counted_tokens
        if not 1 <= opened.num_tokens <= most:
            raise MalformedFrame(
                f"num_tokens is {opened.num_tokens}; must be 1 to {most} for "
                f"{opened.num_blocks} blocks"
            )
        if (why := self._table.no_room_reason(num_bytes, live)) is not None:
            reason, detail = why
            raise MalformedFrame(detail, reason)
        return num_bytes

    def _begin(
        self,
        stream: int,
        opened: pb.HandoffOpen,
        choice: Choice,
        num_bytes: int,
        layout: KvLayout,
        now: float,
    ) -> None:
        """Starts an epoch of a handoff, which drops everything of its older epochs.

        Args:
            stream: The stream that carried the open.
            opened: The open.
            choice: The transport of the epoch.
            num_bytes: Size of the handoff.
            layout: Layout of the handoff.
            now: Current time.monotonic(), in seconds.
        """
        live = self._table.live.get(opened.handoff_id)
        shards = [ShardProgress() for _ in range(layout.num_shards)]
        if live is None:
            live = Handoff(
                opened.handoff_id, 0, None, 0, 0, 0, _S.QUEUED, now, shards, choice, layout
            )
            self._table.add(live)
        elif live.stream not in (None, stream) and live.state in SENDER_AT_WORK:
            detail = f"superseded by epoch {opened.epoch}"
            self._table.refuse(
                live.stream, live.handoff_id, live.epoch, pb.REFUSAL_REASON_OLD_EPOCH, detail
            )
        self._table.assign_stream(live, stream)
        live.epoch, live.shards, live.layout = opened.epoch, shards, layout
        live.choice, live.problem = choice, None
        live.num_blocks, live.num_tokens = opened.num_blocks, opened.num_tokens
        self._table.reserve(live, num_bytes, opened.wait_ms / 1000, now)


def _sent_layout(opened: pb.HandoffOpen, layout: KvLayout) -> KvLayout:
    """Returns the layout of a handoff; raises MalformedFrame if it does not fit this cache."""
    if differing := kv_fingerprint.differences(layout.fingerprint(), opened.fingerprint):
        raise MalformedFrame(
            f"KV caches differ: {'; '.join(differing)}", pb.REFUSAL_REASON_FINGERPRINT
        )
    for group in opened.fingerprint.draft_groups:
        if (problem := _draft_problem(group, layout)) is not None:
            raise MalformedFrame(problem, pb.REFUSAL_REASON_FINGERPRINT)
    return layout.sent_by(opened.fingerprint)


def _draft_problem(group: pb.KvGroup, layout: KvLayout) -> str | None:
    """Returns why a sender's group of draft layers fits no cache of this layout; None if it fits.

    The receiver may have no draft to compare it with. A draft shares the block table of the model's
    layers, so its blocks have as many tokens, and each token takes at least one byte.
    """
    if not layout.keeps_every_token:
        return "draft_groups: there are drafts only where all layers keep every token"
    table = layout.index_table
    tokens = table.block_size_tokens
    fits = (
        group.kind == pb.KvGroup.KIND_FULL
        and group.num_layers > 0
        and group.block_size_tokens == tokens
        and group.block_bytes >= tokens
        and group.table == table.table
    )
    if fits:
        return None
    return (
        f"draft_groups has {group.num_layers} layers of {group.block_size_tokens} tokens, "
        f"{group.block_bytes} bytes, kind {group.kind}, table {group.table}; must be at least "
        f"1 layer of {tokens} tokens, at least {tokens} bytes, KIND_FULL, table {table.table}"
    )


def _parse_open(frame: Frame) -> pb.HandoffOpen:
    """Returns the message of an open frame. Raises MalformedFrame."""
    if len(frame.payload) > MAX_OPEN_BYTES:
        raise MalformedFrame(f"open of {len(frame.payload)} bytes; at most {MAX_OPEN_BYTES}")
    if not verify(frame):
        raise MalformedFrame("the open was altered", pb.REFUSAL_REASON_CHECKSUM)
    try:
        opened = pb.HandoffOpen.FromString(bytes(frame.payload))
    except DecodeError as error:
        raise MalformedFrame(f"the open's payload is not a HandoffOpen: {error}") from None
    if opened.handoff_id != frame.handoff_id or opened.epoch != frame.epoch:
        raise MalformedFrame("the open's payload names another handoff than its header")
    if opened.num_blocks < 1:
        raise MalformedFrame("num_blocks is 0; must be at least 1")
    if len(opened.offers) > MAX_OFFERS:
        raise MalformedFrame(f"{len(opened.offers)} offers; at most {MAX_OFFERS}")
    return opened
