"""A raw gRPC client that sends wrong frames to a real service."""

import asyncio
import contextlib

import grpc
import pytest

from baton.kvtransfer import frames
from baton.kvtransfer.errors import MAX_TEXT_CHARS
from baton.kvtransfer.frames import FrameKind
from baton.kvtransfer.service.grpc_stream import MAX_UNREAD_REPLIES
from baton.v1 import kv_transfer_pb2 as pb
from tests.kvtransfer.raw_sender import dialled

OPENED, DONE, REFUSED = (
    pb.HandoffReply.KIND_OPENED,
    pb.HandoffReply.KIND_COMMITTED,
    pb.HandoffReply.KIND_REFUSED,
)


@pytest.fixture
async def receiver(start):
    # An interrupted handoff waits open_timeout_s for its next epoch. Another deadline would end it
    # much later.
    return await start(open_timeout_s=0.5, idle_timeout_s=1000)


@pytest.fixture
def dial(receiver, layout, handoff):
    return lambda num_blocks=2, of=None: dialled(receiver, layout, of or handoff(num_blocks))


async def test_correct_frames_in_any_order_commit(dial, receiver):
    async with dial() as raw:
        await raw.send(raw.open())
        assert (await raw.reply()).kind == OPENED
        await raw.send(*reversed(list(raw.data())), *raw.commits())
        assert (await raw.reply()).kind == DONE
    assert raw.handoff.load(receiver) == raw.handoff.data
    await receiver.empty()


def flipped(message, at=-1):
    return message[:at] + bytes([message[at] ^ 0x40]) + (message[at:][1:])


SPOILED = {
    "corrupted payload": (lambda f: [flipped(f[0])], pb.REFUSAL_REASON_CHECKSUM),
    "corrupted header": (lambda f: [flipped(f[0], 8)], pb.REFUSAL_REASON_CHECKSUM),
    "truncated": (lambda f: [f[0][:-7]], pb.REFUSAL_REASON_MALFORMED),
    "truncated header": (lambda f: [f[0][:30]], pb.REFUSAL_REASON_MALFORMED),
    "not a frame": (lambda f: [b"GET / HTTP/1.1"], pb.REFUSAL_REASON_MALFORMED),
    "empty": (lambda f: [b""], pb.REFUSAL_REASON_MALFORMED),
    "duplicated": (lambda f: [f[0], f[1], f[0]], pb.REFUSAL_REASON_MALFORMED),
    "one missing": (lambda f: f[1:], pb.REFUSAL_REASON_INCOMPLETE),
    "commit first": (lambda f: f[-2:], pb.REFUSAL_REASON_INCOMPLETE),
    "corrupted commit": (lambda f: [*f[:-2], flipped(f[-2])], pb.REFUSAL_REASON_CHECKSUM),
}


async def test_spoiled_frames_are_refused_with_the_reason_and_never_load(dial, receiver):
    for name, (spoil, reason) in SPOILED.items():
        async with dial() as raw:
            await raw.send(raw.open())
            assert (await raw.reply()).kind == OPENED, name
            await raw.send(*spoil([*raw.data(), *raw.commits()]))
            refusal = await raw.reply()
            assert (refusal.kind, refusal.reason) == (REFUSED, reason), (name, refusal)
            state = await receiver.received(raw.handoff.handoff_id, pb.HANDOFF_STATE_FAILED)
            assert state.reason == reason, name
        assert raw.handoff.load(receiver) is None, name
        await receiver.empty()


async def test_frames_of_unknown_ended_and_older_handoffs_are_refused(dial, receiver):
    async with dial() as raw:
        await raw.send(next(raw.data()))
        assert (await raw.reply()).reason == pb.REFUSAL_REASON_UNKNOWN_HANDOFF
    async with dial() as raw:
        await raw.send(raw.open())
        assert (await raw.reply()).kind == OPENED
        await raw.send(*raw.data(), *raw.commits())
        assert (await raw.reply()).kind == DONE
    assert raw.handoff.load(receiver) == raw.handoff.data
    async with dial(of=raw.handoff) as late:
        await late.send(next(late.data()))
        assert (await late.reply()).reason == pb.REFUSAL_REASON_UNKNOWN_HANDOFF
    async with dial() as raw:
        raw.handoff.epoch = 2
        await raw.send(raw.open())
        assert (await raw.reply()).kind == OPENED
        raw.handoff.epoch = 1
        async with dial(of=raw.handoff) as old:
            await old.send(old.open())
            assert (await old.reply()).reason == pb.REFUSAL_REASON_OLD_EPOCH
        await raw.send(next(raw.data()))
        assert (await raw.reply()).reason == pb.REFUSAL_REASON_OLD_EPOCH
        assert receiver.state(raw.handoff.handoff_id) != pb.HANDOFF_STATE_FAILED
    await receiver.empty()


async def test_frames_of_an_older_epoch_do_not_keep_a_handoff_alive(start, layout, handoff):
    receiver = await start(idle_timeout_s=1.0)
    async with dialled(receiver, layout, handoff(2)) as raw:
        raw.handoff.epoch = 2
        await raw.send(raw.open())
        raw.handoff.epoch = 1
        with contextlib.suppress(asyncio.InvalidStateError, grpc.RpcError):
            while receiver.state(raw.handoff.handoff_id) != pb.HANDOFF_STATE_FAILED:
                await raw.send(next(raw.data()))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await receiver.until(
                            lambda: (
                                receiver.state(raw.handoff.handoff_id) == pb.HANDOFF_STATE_FAILED
                            )
                        )
        state = await receiver.received(raw.handoff.handoff_id, pb.HANDOFF_STATE_FAILED)
        assert state.reason == pb.REFUSAL_REASON_EXPIRED
    await receiver.empty(may_expire=True)


async def test_another_stream_cannot_change_a_handoff(dial, receiver, handoff):
    async with dial() as raw, dial(of=raw.handoff) as foreign:
        await raw.send(raw.open())
        assert (await raw.reply()).kind == OPENED
        await foreign.send(frames.encode(FrameKind.ABORT, raw.handoff.handoff_id, 1))
        assert (await foreign.reply()).reason == pb.REFUSAL_REASON_UNKNOWN_HANDOFF
        await raw.send(*raw.data(), *raw.commits())
        assert (await raw.reply()).kind == DONE
    assert raw.handoff.load(receiver) == raw.handoff.data
    await receiver.empty()


async def test_a_newer_epoch_on_a_new_stream_takes_over(dial, receiver):
    async with dial() as raw:
        await raw.send(raw.open(), *list(raw.data()))
        assert (await raw.reply()).kind == OPENED
        retry_of = raw.handoff
        old_commits = list(raw.commits())
        retry_of.epoch = 2
        retry_of.refresh()
        async with dial(of=retry_of) as retry:
            await retry.send(retry.open())
            assert (await retry.reply()).kind == OPENED
            superseded = await raw.reply()
            assert (superseded.reason, superseded.epoch) == (pb.REFUSAL_REASON_OLD_EPOCH, 1)
            await retry.send(*old_commits)
            assert (await retry.reply()).reason == pb.REFUSAL_REASON_OLD_EPOCH
            assert (await retry.reply()).reason == pb.REFUSAL_REASON_OLD_EPOCH
            await retry.send(*retry.data(), *retry.commits())
            assert (await retry.reply()).kind == DONE
    assert retry_of.load(receiver) == retry_of.data
    await receiver.empty()


async def test_opens_with_wrong_fields_are_refused(dial, receiver):
    lies = {
        "num_tokens": {"num_tokens": 99},
        "another handoff": {"handoff_id": b"x" * 16},
        "num_blocks": {"num_blocks": 2**31},
    }
    async with dial() as raw:
        wrong = pb.HandoffOpen(handoff_id=raw.handoff.handoff_id, epoch=1)
        await raw.send(frames.encode_open(wrong))
        assert "num_blocks is 0" in (await raw.reply()).detail
    for words, lie in lies.items():
        async with dial() as raw:
            opened = raw.open(**lie)
            if "handoff_id" in lie:
                opened = frames.encode(
                    FrameKind.OPEN, raw.handoff.handoff_id, 1, opened[frames.HEADER_BYTES :]
                )
            await raw.send(opened)
            refusal = await raw.reply()
            assert refusal.kind == REFUSED, words
            assert raw.handoff.load(receiver) is None
    await receiver.empty()


LONG = {
    "model": {"fingerprint": pb.KvFingerprint(model="m" * 20 * 2**20)},
    "offer": {"offers": [pb.TransportOffer(name="t" * 20 * 2**20)]},
    "many offers": {"offers": [pb.TransportOffer(name="shm")] * 100_000},
    "nearly too long": {"fingerprint": pb.KvFingerprint(model="\0" * 200_000)},
}


@pytest.mark.parametrize("change", LONG.values(), ids=LONG)
async def test_long_texts_in_an_open_reach_neither_logs_nor_local_clients(change, dial, receiver):
    """A message on the control socket has a limit, beyond which the clients give the service up."""
    receiver.port.subscribe()
    async with dial() as raw:
        await raw.send(raw.open(**change))
        reply = await raw.reply()
        assert reply.kind == REFUSED
        assert len(reply.detail) <= MAX_TEXT_CHARS
        ended = await receiver.received(raw.handoff.handoff_id, pb.HANDOFF_STATE_FAILED)
        assert len(ended.detail) <= MAX_TEXT_CHARS
    await receiver.empty()
    receiver.port.poll()
    assert receiver.port.alive


async def test_a_sender_of_many_wrong_frames_is_cut_off(dial, receiver):
    strange = frames.encode(FrameKind.ABORT, b"another handoff.", 1)
    async with dial() as raw:
        await raw.send(raw.open())
        assert (await raw.reply()).kind == OPENED
        await raw.send(strange * 20_000)
        num_replies = 0
        while (reply := await raw.reply()) is not grpc.aio.EOF:
            assert reply.reason == pb.REFUSAL_REASON_UNKNOWN_HANDOFF
            num_replies += 1
        assert num_replies == MAX_UNREAD_REPLIES
        failed = await receiver.received(raw.handoff.handoff_id, pb.HANDOFF_STATE_FAILED)
        assert "stream ended before the commit" in failed.detail
    stats = await receiver.empty()
    assert sum(stats.refusals.values()) == MAX_UNREAD_REPLIES
