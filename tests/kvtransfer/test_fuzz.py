"""Malformed bytes on every port of a transfer service, from a fixed seed.

The service lives on, counts its refusals, does not grow, and serves the next correct handoff.
"""

import asyncio
import contextlib
import random
import struct

import grpc
import psutil

from baton.kvtransfer import frames, local_wire
from baton.kvtransfer.frames import FrameKind
from baton.kvtransfer.grpc_methods import HANDOFF_METHOD, HANDOFF_NAME, SERVICE
from baton.kvtransfer.transports import shm_transport
from baton.runtime.kv import kv_fingerprint
from baton.runtime.network import rpc
from baton.v1 import kv_transfer_pb2 as pb

SEED = 20
NUM_STREAMS = 90
# Handoffs per round: more than the service remembers, so that a later round adds no memory.
NUM_STRANGERS = 6000
# Frames in one message: even a slow service reads the messages that are written at once before it
# ends a stream that has opened no handoff (shell.UNUSED_STREAM_TIMEOUT_S).
NUM_JOINED = 100
# Most bytes by which the service may grow from the second to the third round (allocator, gRPC).
MAX_GROWTH_BYTES = 4 * 2**20
WORDS = [0, 1, 2, 3, 255, 2**16, 2**31, 2**32 - 1]


class Fuzzer:
    """Makes streams that no correct sender would send.

    Args:
        rng: Source of all random choices.
        layout: Layout of the service's KV cache.
        segments: Names for a sender's segment; the first one exists.
    """

    def __init__(self, rng, layout, segments):
        self.rng, self.layout, self.segments = rng, layout, segments

    def stream(self):
        """Returns the messages of one stream."""
        handoff_id = self.rng.randbytes(16)
        messages = self.honest(handoff_id)
        if self.rng.random() < 0.2:
            return [self.noise() for _ in range(self.rng.randint(1, 4))]
        for _ in range(self.rng.randint(1, 3)):
            at = self.rng.randrange(len(messages))
            messages[at] = self.rng.choice(
                [self.flipped, self.cut, self.spliced, self.stray, self.joined]
            )(messages[at], handoff_id)
        if self.rng.random() < 0.3:
            messages.insert(self.rng.randrange(len(messages) + 1), self.noise())
        return messages

    def honest(self, handoff_id):
        """Returns an open, data or references of every block, and commits with random totals."""
        by_reference = self.rng.random() < 0.5
        opened = self.open(handoff_id, by_reference)
        messages = [frames.encode_open(opened)]
        for shard in range(self.layout.tp_size):
            for layer in range(self.layout.num_layers):
                place = {"shard": shard, "layer": layer, "first_block": 0, "num_blocks": 2}
                if by_reference:
                    offset = self.rng.choice([0, 4096, 2**20, 2**63, 2**64 - 1])
                    messages.append(
                        frames.encode_reference(handoff_id, 1, offset, blocks_checksum=0, **place)
                    )
                else:
                    data = self.rng.randbytes(2 * self.layout.block_bytes)
                    messages.append(frames.encode(FrameKind.DATA, handoff_id, 1, data, **place))
            if opened.fingerprint.draft_groups:
                messages.append(self.draft(handoff_id, shard, opened.fingerprint.draft_groups[0]))
            totals = self.rng.randbytes(self.rng.choice([24, 24, 23, 0]))
            messages.append(frames.encode(FrameKind.COMMIT, handoff_id, 1, totals, shard=shard))
        return messages

    def draft(self, handoff_id, shard, group):
        """Returns a block of a draft, perhaps far behind the blocks of the model."""
        data = self.rng.randbytes(min(group.block_bytes, 4096))
        first = self.rng.choice([0, 1, 127, 2**20])
        place = {"shard": shard, "layer": self.layout.num_layers, "first_block": first}
        return frames.encode(FrameKind.DATA, handoff_id, 1, data, num_blocks=1, **place)

    def fingerprint(self):
        """Returns the service's fingerprint; half of the time with a draft, often a wrong one."""
        fingerprint, rng = self.layout.fingerprint(), self.rng
        if rng.random() < 0.5:
            return fingerprint
        size = self.layout.block_size_tokens
        fingerprint.layout = kv_fingerprint.axes_with_draft(fingerprint.layout)
        fingerprint.draft_revision = "draft"
        for _ in range(rng.choice([0, 1, 1, 2])):
            fingerprint.draft_groups.append(
                pb.KvGroup(
                    kind=rng.choice([pb.KvGroup.KIND_FULL] * 4 + [pb.KvGroup.KIND_WINDOW]),
                    num_layers=rng.choice([1, 1, 1, *WORDS]),
                    num_kv_heads=rng.choice([1, 2, 0]),
                    block_size_tokens=rng.choice([size, size, 1, *WORDS]),
                    block_bytes=rng.choice([size, 1024, *WORDS]),
                    table=rng.choice([0, 0, 0, 1]),
                )
            )
        return fingerprint

    def open(self, handoff_id, by_reference):
        offers = [pb.TransportOffer(name="grpc")]
        if by_reference:
            shm = {
                "shm_domain": shm_transport.domain(),
                "shm_segment": self.rng.choice(self.segments),
            }
            offers.insert(0, pb.TransportOffer(name="shm", **shm))
        return pb.HandoffOpen(
            handoff_id=handoff_id, epoch=1, fingerprint=self.fingerprint(), num_blocks=2,
            num_tokens=8, wait_ms=self.rng.choice(WORDS), offers=offers,
        )  # fmt: skip

    def stranger(self):
        """Returns an open with another layout and a new handoff ID."""
        opened = self.open(self.rng.randbytes(16), False)
        opened.fingerprint.dtype = "other"
        return frames.encode_open(opened)

    # ---- Replacements of one message.

    def noise(self):
        return self.rng.randbytes(self.rng.choice([0, 1, 59, 60, 61, 500, 70_000]))

    def flipped(self, message, handoff_id):
        changed = bytearray(message)
        for _ in range(self.rng.randint(1, 3)):
            head = min(len(message), frames.HEADER_BYTES)
            changed[self.rng.randrange(head)] ^= 1 << self.rng.randrange(8)
        return bytes(changed)

    def cut(self, message, handoff_id):
        return message[: self.rng.randrange(len(message))]

    def spliced(self, message, handoff_id):
        other = self.noise()
        return message[: self.rng.randrange(len(message))] + other

    def joined(self, message, handoff_id):
        """Returns many frames in one message, each with a correct header."""
        return b"".join(self.stray(message, handoff_id) for _ in range(200))

    def stray(self, message, handoff_id):
        """Returns a frame of any kind with random fields and a matching header checksum."""
        rng = self.rng
        payload = rng.choice([b"", rng.randbytes(8), rng.randbytes(24), self.garbled_open()])
        header = frames.encode_header(
            rng.choice([*FrameKind, *FrameKind, 0, 6, 255]),
            rng.choice([handoff_id, handoff_id, rng.randbytes(16)]),
            rng.choice([1, 1, 1, *WORDS]),
            shard=rng.choice([0, 1, 2, 65535]),
            layer=rng.choice(WORDS),
            first_block=rng.choice(WORDS),
            num_blocks=rng.choice(WORDS),
            payload_bytes=rng.choice([len(payload)] * 8 + WORDS),
            payload_checksum=rng.choice([frames.checksum(payload), rng.getrandbits(64)]),
        )
        return header + payload

    def garbled_open(self):
        """Returns a HandoffOpen with impossible values and some changed bytes."""
        opened = self.open(self.rng.randbytes(self.rng.choice([0, 16, 17])), True)
        opened.num_blocks = self.rng.choice(WORDS)
        opened.num_tokens = self.rng.choice(WORDS)
        opened.fingerprint.num_layers = self.rng.choice(WORDS)
        data = bytearray(opened.SerializeToString())
        for _ in range(self.rng.choice([0, 1, 5])):
            data[self.rng.randrange(len(data))] = self.rng.randrange(256)
        return bytes(data)

    def local(self, own_id):
        """Returns a request that another process of the worker could send by mistake.

        It opens only `own_id`, because the process that opens a send must abort it.
        """
        rng = self.rng
        handoff_id = rng.choice([own_id, own_id, b"", rng.randbytes(16)])
        request = pb.LocalRequest(call_id=rng.choice(WORDS))
        kind = rng.choice(
            ["open", "shrink", "frames", "abort", "claim", "release", "drop", "erase", "none"]
        )
        match kind:
            case "open":
                target = rng.choice(["", "x", "127.0.0.1:1", "127.0.0.1:99999", "dns:///", "a b:1"])
                request.open_send.MergeFrom(
                    pb.LocalOpenSend(
                        handoff_id=own_id, target=target, num_blocks=rng.choice(WORDS),
                        num_tokens=rng.choice(WORDS), wait_ms=rng.choice(WORDS),
                    )
                )  # fmt: skip
            case "shrink":
                request.shrink_send.MergeFrom(
                    pb.LocalShrinkSend(
                        handoff_id=handoff_id, num_blocks=rng.choice(WORDS),
                        num_tokens=rng.choice(WORDS),
                    )
                )  # fmt: skip
            case "frames":
                filled = [
                    pb.LocalFrame(
                        handoff_id=handoff_id, shard=rng.choice(WORDS),
                        layer=rng.choice(WORDS), first_block=rng.choice(WORDS),
                        num_blocks=rng.choice(WORDS), last=rng.random() < 0.3,
                    )
                    for _ in range(4)
                ]  # fmt: skip
                request.frames.frames.extend(filled)
            case "abort":
                request.abort_send.handoff_id = handoff_id
            case "claim":
                request.claim.handoff_id, request.claim.shard = handoff_id, rng.choice(WORDS)
            case "release":
                request.release.handoff_id, request.release.shard = handoff_id, rng.choice(WORDS)
                request.release.all_shards = rng.random() < 0.5
            case "erase":
                request.erase.SetInParent()
            case "drop":
                request.drop.handoff_id = handoff_id
        return local_wire.encode(request)


async def write_streams(address, fuzzer):
    """Writes random messages, a few streams at a time, and many wrong opens in one message."""
    streams = [fuzzer.stream() for _ in range(NUM_STREAMS)]
    for _ in range(NUM_STRANGERS // NUM_JOINED):
        streams.append([b"".join(fuzzer.stranger() for _ in range(NUM_JOINED))])
    channel = rpc.channel(address, max_message_bytes=rpc.MAX_FRAME_BYTES)
    method = channel.stream_stream(HANDOFF_METHOD, response_deserializer=pb.HandoffReply.FromString)

    async def write(messages):
        call = method()
        with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            for message in messages:
                await call.write(message)
            await call.done_writing()
        with contextlib.suppress(grpc.RpcError):
            async for _ in call:
                pass

    try:
        for begin in range(0, len(streams), 8):
            await asyncio.gather(*(write(each) for each in streams[begin : begin + 8]))
    finally:
        await channel.close()


async def call_all(address, fuzzer):
    """Calls existing and unknown methods with garbage as the request."""
    channel = rpc.channel(address)
    methods = [f"/{SERVICE}/{name}" for name in (HANDOFF_NAME, "LinkGloo", "Nothing")]
    methods += ["/grpc.health.v1.Health/Check", "/x/y"]
    try:
        for method in methods * 3:
            # Protobuf has no field number 0.
            with contextlib.suppress(grpc.RpcError):
                await channel.unary_unary(method)(b"\0" + fuzzer.noise(), timeout=30)
    finally:
        await channel.close()


async def say(data, reader, writer):
    """Writes bytes to a connection and waits for the reply or the end of the connection."""
    with contextlib.suppress(OSError):
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(30):
            await reader.read()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def write_to_tcp(address, fuzzer):
    host, _, port = address.rpartition(":")
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings = bytes(3) + b"\x04" + bytes(5)
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        preface + fuzzer.rng.randbytes(2000),
        preface + settings + fuzzer.rng.randbytes(2000),
        preface + settings + struct.pack(">I", 2**32 - 1) * 20,
        fuzzer.rng.randbytes(100_000),
        b"",
    ):
        await say(data, *await asyncio.open_connection(host, port))


async def write_to_socket(path, fuzzer):
    """Writes garbage to the control socket: broken messages, then random requests."""
    broken = [
        struct.pack("<I", 2**32 - 1) + b"x" * 100,
        struct.pack("<I", local_wire.MAX_LOCAL_MESSAGE_BYTES + 1),
        struct.pack("<I", local_wire.MAX_LOCAL_MESSAGE_BYTES) + b"beginning only",
        struct.pack("<I", 5) + b"\x07\x07\x07\x07\x07",
        struct.pack("<I", 0) * 1000,
        b"\x01\x00",
    ]
    for _ in range(30):
        handoff_id = fuzzer.rng.randbytes(16)
        requests = b"".join(fuzzer.local(handoff_id) for _ in range(20))
        abort = pb.LocalRequest(abort_send=pb.LocalAbortSend(handoff_id=handoff_id))
        broken.append(requests + local_wire.encode(abort))
    for data in broken:
        await say(data, *await asyncio.open_unix_connection(path))


def own_bytes(pid):
    """Returns the resident bytes of a process without shared memory."""
    info = psutil.Process(pid).memory_info()
    return info.rss - info.shared


async def hand_over(sender, receiver, handoff):
    """Hands over once; again when a slow machine let the receiver's short idle timeout pass."""
    while True:
        one = handoff(8)
        await one.open(sender, receiver.client.address)
        one.fill(sender)
        sent = await sender.sent(one.handoff_id)
        if sent.state == pb.LocalSendState.STATE_COMMITTED:
            break
        assert sent.reason == pb.REFUSAL_REASON_EXPIRED, sent
    await receiver.received(one.handoff_id, pb.HANDOFF_STATE_COMMITTED)
    assert one.load(receiver) == one.data


async def test_malformed_bytes_are_counted_and_leave_nothing(start, handoff, layout):
    times = {"idle_timeout_s": 3.0, "open_timeout_s": 1.0}
    sender, receiver = await asyncio.gather(start(), start(**times))
    segments = [sender.port.description.shm_name, "baton-kv-none", "../etc/passwd", ""]
    fuzzer = Fuzzer(random.Random(SEED), layout, segments)
    client, process = receiver.client, psutil.Process(receiver.client.pid)
    num_refused, sizes, num_fds = 0, [], []
    for _ in range(3):
        await write_streams(client.address, fuzzer)
        await call_all(client.address, fuzzer)
        await write_to_tcp(client.address, fuzzer)
        await write_to_socket(client.socket_path, fuzzer)
        stats = await receiver.empty(may_expire=True)
        assert sum(stats.refusals.values()) > num_refused + NUM_STREAMS + NUM_STRANGERS
        num_refused = sum(stats.refusals.values())
        await hand_over(sender, receiver, handoff)
        await asyncio.gather(sender.empty(), receiver.empty(may_expire=True))
        sizes.append(own_bytes(client.pid))
        num_fds.append(process.num_fds())
    assert sizes[2] < sizes[1] + MAX_GROWTH_BYTES, sizes
    assert num_fds[2] <= num_fds[1], num_fds
    assert not client.gone.is_set()
