"""Builds the messages that the service sends to its local clients over the control socket."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from baton.kvtransfer import local_wire
from baton.kvtransfer.service import receive_state, send_state
from baton.kvtransfer.service.receiver import Receiver
from baton.kvtransfer.service.sender import Sender
from baton.v1 import kv_transfer_pb2 as pb


def claimed(grant: receive_state.Grant, shard: int, first: int) -> pb.LocalClaimed:
    """Returns the answer to a claim: at most MAX_LISTED_FRAMES of its frames, from `first`."""
    return pb.LocalClaimed(
        offset=grant.offset,
        num_blocks=grant.num_blocks,
        num_tokens=grant.num_tokens,
        num_frames=len(grant.frames),
        frames=[
            pb.LocalFrame(
                handoff_id=grant.handoff_id,
                shard=shard,
                layer=frame.layer,
                first_block=frame.first_block,
                num_blocks=frame.num_blocks,
                checksum=frame.checksum,
            )
            for frame in grant.frames[first : first + local_wire.MAX_LISTED_FRAMES]
        ],
    )


def received_state(changed: receive_state.Changed) -> pb.LocalHandoffState:
    """Returns the message for the state of a handoff to this worker."""
    return pb.LocalHandoffState(
        handoff_id=changed.handoff_id,
        epoch=changed.epoch,
        state=changed.state.value,
        reason=changed.reason,
        detail=changed.detail,
        num_blocks=changed.num_blocks,
        num_tokens=changed.num_tokens,
        num_bytes=changed.num_bytes,
        transport=changed.transport,
        num_shards=changed.num_shards,
        has_draft=changed.has_draft,
    )


def sent_state(ended: send_state.Ended) -> pb.LocalSendState:
    """Returns the message that says how a send ended."""
    made = pb.LocalSendState
    return made(
        handoff_id=ended.handoff_id,
        epoch=ended.epoch,
        state=made.STATE_COMMITTED if ended.committed else made.STATE_FAILED,
        reason=ended.reason,
        detail=ended.detail,
        num_bytes=ended.num_bytes,
        exposed_us=round(ended.exposed_s * 1e6),
        transport=ended.transport,
        num_fallbacks=ended.num_fallbacks,
        num_frames=ended.num_frames,
        reserve_us=round(ended.reserve_s * 1e6),
        open_us=round(ended.open_s * 1e6),
        fill_us=round(ended.fill_s * 1e6),
    )


def statistics(
    sender: Sender,
    receiver: Receiver,
    peers: Iterable[pb.PeerTransport],
    access_refusals: Mapping[str, int],
) -> pb.LocalStatistics:
    """Returns the counts and sizes from which the worker makes its metrics.

    Args:
        sender: The service's sender.
        receiver: The service's receiver.
        peers: The transport of the latest handoff to each worker.
        access_refusals: Calls that the gRPC port refused, by reason.
    """
    sent, received = sender.statistics, receiver.statistics
    sends, receives = sender.arena_statistics(), receiver.arena_statistics()
    return pb.LocalStatistics(
        send_bytes_total=sends.total_bytes,
        send_bytes_used=sends.used_bytes,
        receive_bytes_total=receives.total_bytes,
        receive_bytes_used=receives.used_bytes,
        num_sends=sender.num_live,
        num_receives=receiver.num_live,
        bytes_sent=sent.num_bytes.total(),
        bytes_received=received.num_bytes.total(),
        frames_sent=sent.num_frames.total(),
        frames_received=received.num_frames.total(),
        handoffs_committed=sent.num_committed.total() + received.num_committed,
        handoffs_failed=sent.num_failed + received.num_failed,
        refusals=dict(sent.refusals + received.refusals),
        expiries=sent.num_expired + received.num_expired,
        num_waiting_sends=sender.num_waiting,
        num_waiting_receives=receiver.num_waiting,
        transports=[
            pb.TransportStatistics(
                name=name,
                bytes_sent=sent.num_bytes[name],
                bytes_received=received.num_bytes[name],
                frames_sent=sent.num_frames[name],
                frames_received=received.num_frames[name],
                handoffs_committed=sent.num_committed[name],
                fallbacks=sent.num_fallbacks[name],
            )
            for name in sorted({*sent.num_bytes, *received.num_bytes, *sent.num_fallbacks})
        ],
        peers=peers,
        access_refusals=access_refusals,
    )
