"""Links over gloo: frames arrive intact and in order, and a link always ends in bounded time."""

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from baton.kvtransfer import frames
from baton.kvtransfer.frames import FrameKind
from baton.kvtransfer.sending import Outgoing
from baton.kvtransfer.transports.collective import FRAMES_KEY, ReceivingLink, SendingLink
from baton.kvtransfer.transports.link_store import MAX_KEYS, LinkStore, may_have_gpu
from baton.kvtransfer.transports.process_group import LinkOptions, unusable_reason
from baton.kvtransfer.transports.transport import LinkLost
from baton.v1 import kv_transfer_pb2 as pb

HANDOFF = b"h" * 16
OPTIONS = LinkOptions("gloo", "127.0.0.1", frame_timeout_s=30.0)
HASTY = LinkOptions("gloo", "127.0.0.1", open_timeout_s=1.0, frame_timeout_s=0.5)
# Longest wait for something that must happen; no test asserts that it happens sooner.
WAIT_S = 120.0


def data_frame(payload, number=0, *, checksum=None):
    header = frames.encode_header(
        FrameKind.DATA, HANDOFF, 1, first_block=number, num_blocks=1, payload_bytes=len(payload),
        payload_checksum=frames.checksum(payload) if checksum is None else checksum,
    )  # fmt: skip
    return Outgoing(header, memoryview(payload))


def commit_frame():
    payload = frames.Totals(1, 2, 3).encode()
    return Outgoing(frames.encode(FrameKind.COMMIT, HANDOFF, 1, payload), memoryview(b""))


class Ends:
    """Both ends of a link on one event loop; each takes the other's messages."""

    def __init__(self, options=OPTIONS, receiver_options=None):
        self.loop = asyncio.get_running_loop()
        self.got, self.lost = [], {"sender": [], "receiver": []}
        self.changed = asyncio.Event()
        self.on_frame = self.keep
        self.sender = SendingLink(
            options, lambda message: self.pass_on("receiver", message), self.lost_by("sender")
        )
        self.receiver = ReceivingLink(
            receiver_options or options,
            lambda message: self.pass_on("sender", message),
            self.lost_by("receiver"),
            lambda frame: self.on_frame(frame),
        )

    def pass_on(self, end, message):
        self.loop.call_soon(lambda: getattr(self, end).received(message))

    def lost_by(self, end):
        def lost(detail):
            self.lost[end].append(detail)
            self.changed.set()

        return lost

    def keep(self, frame):
        assert frames.verify(frame)
        self.got.append((frame.kind, frame.first_block, bytes(frame.payload)))
        self.changed.set()

    async def opened(self):
        await asyncio.gather(self.sender.opened(), self.receiver.opened())

    async def until(self, done):
        async with asyncio.timeout(WAIT_S):
            while not done():
                self.changed.clear()
                await self.changed.wait()

    async def close(self):
        await asyncio.gather(self.sender.close(), self.receiver.close())


@contextlib.asynccontextmanager
async def joined(*arguments):
    ends = Ends(*arguments)
    try:
        await ends.opened()
        yield ends
    finally:
        await ends.close()


async def test_frames_of_every_size_arrive_intact_and_in_order():
    rng = random.Random(1)
    sizes = [1, 59, 60, 61, 4096, 2**16 + 1, 2**20, 2**21, 3 * 2**20 + 7, 1, 2]
    payloads = [bytearray(rng.randbytes(size)) for size in sizes]
    async with joined() as ends:
        batch = [data_frame(payload, number) for number, payload in enumerate(payloads)]
        await ends.sender.send(batch[:1])
        await ends.sender.send([*batch[1:6], commit_frame(), *batch[6:]])
        await ends.sender.send([commit_frame()])
        await ends.until(lambda: len(ends.got) == len(sizes) + 2)
        assert [number for kind, number, _ in ends.got if kind == FrameKind.DATA] == list(
            range(len(sizes))
        )
        assert [payload for kind, _, payload in ends.got if kind == FrameKind.DATA] == payloads
        assert [kind for kind, *_ in ends.got].index(FrameKind.COMMIT) == 6
        assert ends.got[-1][0] == FrameKind.COMMIT
        assert ends.lost == {"sender": [], "receiver": []}


async def test_many_sends_at_once_while_the_loop_is_busy():
    num_sends, num_frames = 24, 12
    payloads = [bytearray([send]) * 20_000 for send in range(num_sends)]

    async def send(ends, number):
        for each in range(num_frames):
            await ends.sender.send([data_frame(payloads[number], number * num_frames + each)])

    async with joined() as ends:
        spinning = asyncio.create_task(_spin())
        await asyncio.gather(*(send(ends, number) for number in range(num_sends)))
        await ends.until(lambda: len(ends.got) == num_sends * num_frames)
        spinning.cancel()
        for number, payload in enumerate(payloads):
            mine = [got for got in ends.got if got[1] // num_frames == number]
            assert [got[1] % num_frames for got in mine] == list(range(num_frames))
            assert all(got[2] == payload for got in mine)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    wait_until_none(_link_threads)


def wait_until_none(threads):
    """Waits until these threads have ended: the kernel lists a joined thread a little longer."""
    deadline = time.monotonic() + WAIT_S
    while left := threads():
        assert time.monotonic() < deadline, left
        time.sleep(0.001)


async def _spin():
    while True:
        await asyncio.sleep(0)


async def test_a_payload_is_its_owners_again_once_sent():
    """The memory is reused at once for the next frame, like staging."""
    memory = bytearray(300_000)
    async with joined() as ends:
        for number in range(20):
            memory[:] = bytes([number]) * len(memory)
            await ends.sender.send([data_frame(memory, number)])
        await ends.until(lambda: len(ends.got) == 20)
        assert [got[2][0] for got in ends.got] == list(range(20))
        # Resizing raises if the link still refers to the memory.
        memory.clear()


async def test_a_cancelled_send_waits_until_its_payload_is_no_longer_read():
    ends = Ends()
    await ends.opened()
    memory = bytearray(2**20)
    held = asyncio.Event()
    # The receiving end is not told of the frame, so the frame cannot leave.
    ends.pass_on = lambda end, message: held.set()
    sending = asyncio.create_task(ends.sender.send([data_frame(memory)]))
    await held.wait()
    sending.cancel()
    await asyncio.wait([sending], timeout=0.1)
    assert not sending.done()
    ends.sender.fail("the stream has ended")
    await asyncio.wait([sending])
    assert sending.cancelled()
    # The cancellation's traceback refers to the payload.
    del sending
    gc.collect()
    memory.clear()
    await ends.close()
    assert ends.lost["sender"] == ["the stream has ended"]


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(b"x", id="short"),
        pytest.param(struct.pack("<I", 60) + b"x" * 59, id="truncated"),
        pytest.param(struct.pack("<I", 59) + b"x" * 59, id="shorter than a header"),
        pytest.param(struct.pack("<I", 60) + b"x" * 60, id="no frame"),
        pytest.param(struct.pack("<I", 2**32 - 1) + b"x" * 60, id="length"),
        pytest.param(struct.pack("<I", 62) + data_frame(b"abc").header + b"ab", id="tail"),
        pytest.param(
            struct.pack("<I", 60)
            + frames.encode_header(FrameKind.DATA, HANDOFF, 1, payload_bytes=2**32 - 1),
            id="too large",
        ),
        pytest.param(struct.pack("<I", 2**21) + b"x" * 2**21, id="too large whole"),
    ],
)
async def test_garbage_ends_the_link(value):
    options = LinkOptions("gloo", "127.0.0.1", max_payload_bytes=2**20)
    async with joined(options) as ends:
        ends.receiver.received(pb.LinkMessage(key=FRAMES_KEY, value=value))
        await ends.until(lambda: ends.lost["receiver"])
        assert len(ends.lost["receiver"]) == 1
        assert ends.receiver.lost == ends.lost["receiver"][0]
        assert ends.got == []


@pytest.mark.parametrize("size", [0, 7, 170, 1000])
async def test_a_peer_that_joins_with_garbage(size):
    lost = []
    link = SendingLink(OPTIONS, lambda message: None, lost.append)
    link.received(pb.LinkMessage(key="0/1", value=b"\x10" * size))
    with pytest.raises(LinkLost, match="not an address"):
        await link.opened()
    await link.close()
    assert len(lost) == 1


def listening_addresses():
    return {
        each.laddr
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_LISTEN
    }


async def test_garbage_bytes_on_gloos_own_port_do_no_harm():
    # Servers of other tests may still be closing.
    before = listening_addresses()
    async with joined() as ends:
        listening = listening_addresses() - before
        assert {address.ip for address in listening} == {OPTIONS.host}
        rng = random.Random(2)
        for address in listening:
            for size in (1, 8, 100, 70_000):
                with socket.create_connection(address) as stranger:
                    stranger.sendall(rng.randbytes(size))
        await ends.sender.send([data_frame(bytearray(b"abc"))])
        await ends.until(lambda: ends.got)


async def test_a_failing_receiver_ends_both():
    async with joined() as ends:

        def fail(frame):
            raise ValueError("as told")

        ends.on_frame = fail
        memory = bytearray(2**20)
        with pytest.raises(LinkLost):
            await _send_until_lost(ends.sender, memory)
        await ends.until(lambda: ends.lost["sender"])
        assert ends.lost["receiver"] == ["internal error"]


async def _send_until_lost(link, memory):
    async with asyncio.timeout(WAIT_S):
        while True:
            await link.send([data_frame(memory)])


async def test_a_link_without_a_peer_fails_after_its_timeout():
    link = SendingLink(HASTY, lambda message: None, lambda detail: lost.append(detail))
    lost = []
    with pytest.raises(LinkLost, match="did not join within 1 s"):
        await link.opened()
    assert len(lost) == 1
    with pytest.raises(LinkLost):
        await link.send([commit_frame()])
    await link.close()
    await link.close()
    assert len(lost) == 1


async def test_close_while_joining_is_at_once():
    lost = []
    link = SendingLink(OPTIONS, lambda message: None, lost.append)
    await link.close()
    assert lost == []
    wait_until_none(_link_threads)
    await link.close()
    with pytest.raises(LinkLost, match="closed"):
        await link.opened()


async def test_an_unreachable_host_is_refused():
    lost = []
    # A documentation address (RFC 5737): no interface has it.
    link = SendingLink(LinkOptions("gloo", "192.0.2.1"), lambda message: None, lost.append)
    with pytest.raises(LinkLost, match="gloo: "):
        await link.opened()
    await link.close()
    with pytest.raises(ValueError, match="host is empty"):
        LinkOptions("gloo", "")


async def test_pair_after_pair_leaves_nothing():
    process, num_pairs = psutil.Process(), 20

    async def use():
        async with joined() as ends:
            await ends.sender.send([data_frame(bytearray(1000))])
            await ends.until(lambda: ends.got)
            assert _gloo_threads()
        wait_until_none(_link_threads)
        wait_until_none(_gloo_threads)

    await use()
    num_fds = process.num_fds()
    for _ in range(num_pairs):
        await use()
    # gRPC of other tests lives as long as the process, and opens and closes descriptors meanwhile.
    assert process.num_fds() - num_fds < num_pairs


def _link_threads():
    return [thread for thread in threading.enumerate() if thread.name == "kv-link"]


def _gloo_threads():
    """Returns the names of gloo's threads; Python does not know them."""
    found = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            found.append(path.read_text().strip())
    return [name for name in found if "gloo" in name]


def test_a_store_takes_no_more_than_a_rendezvous_needs():
    published = []
    store = LinkStore(lambda key, value: published.append((key, value)))
    store.set("mine", b"1")
    assert published == [("mine", b"1")]
    assert store.check(["mine"])
    assert not store.check(["mine", "other"])
    with pytest.raises(LinkLost, match=r"within 0\.01 s"):
        store.get("other", 0.01)
    with pytest.raises(LinkLost, match="bytes"):
        store.received("large", bytes(2**20))
    for number in range(MAX_KEYS - 1):
        store.received(str(number), b"")
    store.received("0", b"again")
    with pytest.raises(LinkLost, match="keys"):
        store.received("one more", b"")
    store.close("over")
    with pytest.raises(LinkLost, match="over"):
        store.wait(["other"], 10.0)


def test_backends_of_this_machine():
    assert unusable_reason("gloo") is None
    assert unusable_reason("nccl") is None or not may_have_gpu() or unusable_reason("nccl")


# ---- With the peer in another process, joined by a Unix socket instead of a gRPC stream.

_LENGTH = struct.Struct("<I")


# Tells a sending peer that the other end is open.
OPENED_KEY = "opened"


class Stream:
    """One end of the stream between the two processes."""

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    def publish(self, message):
        value = message.SerializeToString()
        self._writer.write(_LENGTH.pack(len(value)) + value)

    async def read(self):
        (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
        return pb.LinkMessage.FromString(await self._reader.readexactly(length))

    async def feed(self, received):
        while True:
            received(await self.read())

    def close(self):
        self._writer.close()


async def peer(role, action, socket_path):
    """Runs one end of a link that stops, dies or leaves as soon as a frame is begun."""
    stream = Stream(*await asyncio.open_unix_connection(socket_path))
    begun, other_is_open = asyncio.Event(), asyncio.Event()

    def act():
        if action == "leave":
            begun.set()
        else:
            os.kill(os.getpid(), getattr(signal, action))

    if role == "sender":

        def publish(message):
            stream.publish(message)
            if message.key == FRAMES_KEY:
                act()

        link = SendingLink(OPTIONS, publish, lambda detail: None)
    else:
        link = ReceivingLink(OPTIONS, stream.publish, lambda detail: None, lambda frame: None)

    def received(message):
        if message.key == OPENED_KEY:
            other_is_open.set()
        elif message.key == FRAMES_KEY:
            act()
        else:
            link.received(message)

    feeding = asyncio.create_task(stream.feed(received))
    if role == "sender":
        # One end may have joined the group while the other still connects, and would then fail.
        await other_is_open.wait()
        sending = asyncio.create_task(link.send([data_frame(bytearray(2**24))]))
    await begun.wait()
    # The link is neither closed nor waited for: the interpreter must still end.
    if role == "sender":
        await asyncio.sleep(0.05)
        assert not sending.done()
        os.write(1, b"")
    feeding.cancel()


def peers():
    """Forks a peer for each line of standard input, because importing torch takes long."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(peer(*json.loads(line)))
            return
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@pytest.fixture(scope="module")
def peer_server():
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        yield server
        server.stdin.close()
        assert server.wait(WAIT_S) == 0


class RemotePeer:
    """A peer process and the stream to it."""

    def __init__(self, server, pid):
        self.server, self.stream = server, None
        # A pidfd: the process ID may be reused once the server has reaped the process.
        self.process = os.pidfd_open(pid)
        self.lost = asyncio.get_running_loop().create_future()
        self.exit_code = None

    async def ends(self):
        """Waits until the process has ended; returns its exit code."""
        if self.exit_code is None:
            self.exit_code = int(await asyncio.to_thread(self.server.stdout.readline))
        return self.exit_code

    async def kill(self):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)
        return await self.ends()


@pytest.fixture
async def remote(peer_server, tmp_path):
    """Starts peers, and kills them after the test."""
    listeners, started = [], []

    async def start(role, action):
        arrived = asyncio.get_running_loop().create_future()
        path = str(tmp_path / "stream.sock")
        listeners.append(
            await asyncio.start_unix_server(lambda *ends: arrived.set_result(ends), path)
        )
        peer_server.stdin.write(json.dumps([role, action, path]) + "\n")
        peer_server.stdin.flush()
        pid = int(await asyncio.to_thread(peer_server.stdout.readline))
        started.append(RemotePeer(peer_server, pid))
        async with asyncio.timeout(WAIT_S):
            started[-1].stream = Stream(*await arrived)
        return started[-1]

    yield start
    for each in started:
        await each.kill()
        os.close(each.process)
        if each.stream is not None:
            each.stream.close()
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("action", ["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_a_peer_that_falls_silent_within_a_frame(remote, role, action):
    other = await remote(role, action)
    # A killed peer must be noticed by its closed connection, so only a stopped one gets a timeout.
    timeout_s = 1.0 if action == "SIGSTOP" else WAIT_S
    options = LinkOptions("gloo", "127.0.0.1", open_timeout_s=WAIT_S, frame_timeout_s=timeout_s)
    got = []
    if role == "receiver":
        link = SendingLink(options, other.stream.publish, other.lost.set_result)
    else:
        link = ReceivingLink(options, other.stream.publish, other.lost.set_result, got.append)
    # The link does not see the end of the stream: it must notice by itself.
    feeding = asyncio.create_task(other.stream.feed(link.received))
    async with asyncio.timeout(WAIT_S):
        await link.opened()
        other.stream.publish(pb.LinkMessage(key=OPENED_KEY))
        if role == "receiver":
            memory = bytearray(2**24)
            with pytest.raises(LinkLost):
                await link.send([data_frame(memory)])
            memory.clear()
        detail = await other.lost
    assert ("Timed out" in detail) == (action == "SIGSTOP"), detail
    assert got == []
    feeding.cancel()
    await asyncio.wait([feeding])
    await link.close()
    wait_until_none(_link_threads)
    # The peer still exists: this end did not have to wait for it.
    assert await other.kill() == -signal.SIGKILL


@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_a_process_can_leave_with_a_frame_begun(remote, role):
    other = await remote(role, "leave")
    if role == "receiver":
        link = SendingLink(OPTIONS, other.stream.publish, other.lost.set_result)
    else:
        # The link is not told of the frame, so the peer's send stays begun.
        link = ReceivingLink(OPTIONS, other.stream.publish, other.lost.set_result, print)
    feeding = asyncio.create_task(
        other.stream.feed(
            lambda message: None if message.key == FRAMES_KEY else link.received(message)
        )
    )
    async with asyncio.timeout(WAIT_S):
        await link.opened()
        other.stream.publish(pb.LinkMessage(key=OPENED_KEY))
        if role == "receiver":
            with pytest.raises(LinkLost):
                await link.send([data_frame(bytearray(2**24))])
        assert await other.ends() == 0
    feeding.cancel()
    await asyncio.wait([feeding])
    await link.close()


if __name__ == "__main__":
    peers()
