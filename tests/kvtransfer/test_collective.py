"""Links over gloo: reads bring the right bytes, or fail; each ends once, and links end in time."""

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
from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.transports.collective import PART_BYTES, ReceivingLink, SendingLink
from baton.kvtransfer.transports.link_store import MAX_KEYS, LinkStore, may_have_gpu
from baton.kvtransfer.transports.process_group import LinkOptions, unusable_reason
from baton.kvtransfer.transports.transport import Pull
from baton.v1 import kv_transfer_pb2 as pb

# Longest wait for something that must happen; no test asserts that it happens sooner.
WAIT_S = 120.0
OPTIONS = LinkOptions("gloo", "127.0.0.1", open_timeout_s=WAIT_S, frame_timeout_s=WAIT_S)
HASTY = LinkOptions("gloo", "127.0.0.1", open_timeout_s=1.0, frame_timeout_s=0.5)
MEMORY_BYTES = 4 * PART_BYTES


def asked(offset, num_bytes):
    return pb.LinkMessage(read=pb.LinkRead(offset=offset, num_bytes=num_bytes))


class Reader:
    """A receiving end, its memory, and the ends of its reads."""

    def __init__(self, options, publish, on_lost):
        self.memory, self.ends = bytearray(MEMORY_BYTES), []
        self.changed, self._num_reads = asyncio.Event(), 0
        self.link = ReceivingLink(
            options, publish, on_lost, memoryview(self.memory), MEMORY_BYTES, self._ended
        )

    def _ended(self, ends):
        self.ends += ends
        self.changed.set()

    def read(self, source, num_bytes, target=None):
        """Begins a read, to the same offset unless told otherwise; returns its serial number."""
        self._num_reads += 1
        target = source if target is None else target
        self.link.read(Pull(self._num_reads, 1, source, target, num_bytes))
        return self._num_reads

    async def all_ended(self):
        """Waits until every read has ended; returns their digests. None of them ends twice."""
        async with asyncio.timeout(WAIT_S):
            while len(self.ends) < self._num_reads:
                self.changed.clear()
                await self.changed.wait()
        digests = {ended.serial: ended.digest for ended in self.ends}
        assert len(digests) == len(self.ends)
        return digests


class Ends:
    """Both ends of a link on one event loop; each takes the other's messages.

    Attributes:
        source: The sending end's memory.
        held: Messages to the sending end that are not passed on; None: all are.
    """

    def __init__(self, options=OPTIONS):
        self.loop = asyncio.get_running_loop()
        self.lost = {"sender": [], "receiver": []}
        self.changed = asyncio.Event()
        self.held = None
        self.source = bytearray(random.Random(1).randbytes(MEMORY_BYTES))
        self.sender = SendingLink(
            options,
            lambda message: self.loop.call_soon(self.receiver.received, message),
            self.lost_by("sender"),
            memoryview(self.source),
        )
        self.reader = Reader(options, self.to_sender, self.lost_by("receiver"))
        self.receiver = self.reader.link

    def to_sender(self, message):
        if self.held is not None and message.HasField("read"):
            self.held.append(message)
            self.changed.set()
        else:
            self.loop.call_soon(self.sender.received, message)

    def lost_by(self, end):
        def lost(detail):
            self.lost[end].append(detail)
            self.changed.set()

        return lost

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


async def test_reads_of_every_size_bring_the_bytes_to_their_place_and_change_nothing_else():
    sizes = [1, 59, 4096, 2**16 + 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 1]
    async with joined() as ends:
        expected, source, target, digests = bytearray(MEMORY_BYTES), 0, 3, {}
        for size in sizes:
            data = ends.source[source : source + size]
            serial = ends.reader.read(source, size, target)
            digests[serial] = frames.checksum(data)
            expected[target : target + size] = data
            source, target = source + size, target + size + 5
        assert await ends.reader.all_ended() == digests
        assert ends.reader.memory == expected
        whole = ends.reader.read(0, MEMORY_BYTES)
        assert (await ends.reader.all_ended())[whole] == frames.checksum(ends.source)
        assert ends.reader.memory == ends.source
        assert ends.lost == {"sender": [], "receiver": []}


async def test_many_reads_while_the_loop_is_busy():
    size = 20_000
    async with joined() as ends:
        spinning = asyncio.create_task(_spin())
        sources = {ends.reader.read(at * size, size): at * size for at in range(300)}
        digests = await ends.reader.all_ended()
        spinning.cancel()
        assert [ended.serial for ended in ends.reader.ends] == sorted(sources)
        for serial, source in sources.items():
            assert digests[serial] == frames.checksum(ends.source[source : source + size])
        assert ends.reader.memory[: 300 * size] == ends.source[: 300 * size]


async def _spin():
    while True:
        await asyncio.sleep(0)


async def test_bytes_that_change_before_they_are_sent_have_another_digest():
    async with joined() as ends:
        ends.held = []
        ends.reader.read(0, 1000)
        await ends.until(lambda: ends.held)
        before = frames.checksum(ends.source[:1000])
        ends.source[999] ^= 1
        ends.sender.received(ends.held.pop())
        digest = (await ends.reader.all_ended())[1]
        assert digest == frames.checksum(ends.reader.memory[:1000]) != before


async def test_bytes_that_are_sent_twice_are_found_by_their_digest():
    async with joined() as ends:
        ends.held = []
        ends.reader.read(0, 1000)
        ends.reader.read(1000, 1000)
        await ends.until(lambda: len(ends.held) == 2)
        first, _ = ends.held
        ends.sender.received(first)
        ends.sender.received(first)
        digest = frames.checksum(ends.source[:1000])
        assert await ends.reader.all_ended() == {1: digest, 2: digest}
        assert digest != frames.checksum(ends.source[1000:2000])


async def test_nothing_lands_after_a_read_has_ended():
    """The target belongs to another handoff then; the sender sends late."""
    async with joined() as ends:
        ends.held = []
        for at in range(6):
            ends.reader.read(at * 1000, 1000)
        await ends.until(lambda: len(ends.held) == 4)
        ends.receiver.fail("the stream has ended")
        assert set((await ends.reader.all_ended()).values()) == {None}
        ends.reader.memory[:] = b"\7" * MEMORY_BYTES
        for message in ends.held:
            ends.sender.received(message)
        # The sender finds out by itself that the other end is gone.
        await ends.until(lambda: ends.lost["sender"])
        await ends.close()
        assert ends.reader.memory == b"\7" * MEMORY_BYTES
        # The link's buffers keep no reference to the memory.
        gc.collect()


async def test_a_read_whose_bytes_never_come_fails_after_the_timeout():
    async with joined(HASTY) as ends:
        ends.held = []
        ends.reader.read(0, PART_BYTES + 1)
        ends.reader.read(0, 1)
        assert await ends.reader.all_ended() == {1: None, 2: None}
        (detail,) = ends.lost["receiver"]
        assert "Timed out" in detail
        # A read by a link that is over fails too.
        ends.reader.read(0, 1)
        assert (await ends.reader.all_ended())[3] is None
        assert ends.reader.memory == bytes(MEMORY_BYTES)


async def test_a_link_that_is_closed_fails_its_reads_and_lets_go_of_the_memory():
    ends = Ends()
    await ends.opened()
    ends.held = []
    ends.reader.read(0, 1000)
    await ends.until(lambda: ends.held)
    await ends.close()
    assert await ends.reader.all_ended() == {1: None}
    assert ends.lost == {"sender": [], "receiver": []}


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([asked(0, 0)], id="nothing"),
        pytest.param([asked(0, PART_BYTES + 1)], id="too large"),
        pytest.param([asked(MEMORY_BYTES - 1, 2)], id="behind the end"),
        pytest.param([asked(2**63, 1)], id="far behind the end"),
        pytest.param([asked(0, 1)] * 66, id="too many"),
        pytest.param([pb.LinkMessage(key="x", value=bytes(2**20))], id="large value"),
        pytest.param([pb.LinkMessage(key="x" * 2**20)], id="large key"),
    ],
)
async def test_wrong_messages_end_the_sending_end(messages):
    lost = []
    # It has not joined, so it begins no send.
    link = SendingLink(
        OPTIONS, lambda message: None, lost.append, memoryview(bytearray(MEMORY_BYTES))
    )
    for message in messages:
        link.received(message)
    assert len(lost) == 1
    assert link.lost == lost[0]
    await link.close()


@pytest.mark.parametrize("size", [0, 7, 170, 1000])
async def test_a_peer_that_joins_with_garbage(size):
    lost = []
    link = SendingLink(OPTIONS, lambda message: None, lost.append, memoryview(bytearray(1)))
    link.received(pb.LinkMessage(key="0/1", value=b"\x10" * size))
    with pytest.raises(TransferError, match="not an address"):
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
        ends.reader.read(0, 3)
        assert await ends.reader.all_ended() == {1: frames.checksum(ends.source[:3])}


async def test_an_end_that_is_closed_ends_the_other():
    async with joined() as ends:
        await ends.sender.close()
        ends.reader.read(0, 1)
        # The sending end answers nothing more: the closed connection ends the read.
        assert await ends.reader.all_ended() == {1: None}
        assert len(ends.lost["receiver"]) == 1


async def test_a_link_without_a_peer_fails_after_its_timeout():
    lost = []
    reader = Reader(HASTY, lambda message: None, lost.append)
    reader.read(0, 1)
    with pytest.raises(TransferError, match="did not join within 1 s"):
        await reader.link.opened()
    assert await reader.all_ended() == {1: None}
    assert len(lost) == 1
    await reader.link.close()
    await reader.link.close()
    assert len(lost) == 1


async def test_close_while_joining_is_at_once():
    lost = []
    link = SendingLink(OPTIONS, lambda message: None, lost.append, memoryview(bytearray(1)))
    await link.close()
    assert lost == []
    wait_until_none(_link_threads)
    await link.close()
    with pytest.raises(TransferError, match="closed"):
        await link.opened()


async def test_an_unreachable_host_is_refused():
    lost = []
    # A documentation address (RFC 5737): no interface has it.
    options = LinkOptions("gloo", "192.0.2.1")
    link = SendingLink(options, lambda message: None, lost.append, memoryview(bytearray(1)))
    with pytest.raises(TransferError, match="gloo: "):
        await link.opened()
    await link.close()
    with pytest.raises(ValueError, match="host is empty"):
        LinkOptions("gloo", "")


async def test_pair_after_pair_leaves_nothing():
    process, num_pairs = psutil.Process(), 20

    async def use():
        async with joined() as ends:
            ends.reader.read(0, 1000)
            await ends.reader.all_ended()
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
    with pytest.raises(TransferError, match=r"within 0\.01 s"):
        store.get("other", 0.01)
    with pytest.raises(TransferError, match="bytes"):
        store.received("large", bytes(2**20))
    with pytest.raises(TransferError, match="characters"):
        store.received("k" * 2**20, b"")
    for number in range(MAX_KEYS - 1):
        store.received(str(number), b"")
    store.received("0", b"again")
    with pytest.raises(TransferError, match="keys"):
        store.received("one more", b"")
    store.close("over")
    with pytest.raises(TransferError, match="over"):
        store.wait(["other"], 10.0)


def test_backends_of_this_machine():
    assert unusable_reason("gloo") is None
    assert unusable_reason("nccl") is None or not may_have_gpu() or unusable_reason("nccl")


# ---- With the peer in another process, joined by a Unix socket instead of a gRPC stream.

_LENGTH = struct.Struct("<I")
# A read of this size in a remote test; more than the connection holds.
_READ_BYTES = MEMORY_BYTES


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
    """Runs one end of a link that stops, dies or leaves when the first read has begun.

    A sending end is not told of the read, so it sends nothing.
    """
    stream = Stream(*await asyncio.open_unix_connection(socket_path))
    begun = asyncio.Event()

    def act():
        if action == "leave":
            begun.set()
        else:
            os.kill(os.getpid(), getattr(signal, action))

    if role == "sender":
        memory = memoryview(bytearray(MEMORY_BYTES))
        link = SendingLink(OPTIONS, stream.publish, lambda detail: None, memory)

        def received(message):
            if message.HasField("read"):
                act()
            else:
                link.received(message)

    else:

        def publish(message):
            stream.publish(message)
            if message.HasField("read"):
                # The message must leave this process first.
                asyncio.get_running_loop().call_soon(act)

        reader = Reader(OPTIONS, publish, lambda detail: None)
        received = reader.link.received
        reader.read(0, _READ_BYTES)
    feeding = asyncio.create_task(stream.feed(received))
    await begun.wait()
    # The link is neither closed nor waited for: the interpreter must still end.
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
async def test_a_sender_that_falls_silent_within_a_read(remote, action):
    other = await remote("sender", action)
    # A killed peer must be noticed by its closed connection, so only a stopped one gets a timeout.
    timeout_s = 1.0 if action == "SIGSTOP" else WAIT_S
    options = LinkOptions("gloo", "127.0.0.1", open_timeout_s=WAIT_S, frame_timeout_s=timeout_s)
    reader = Reader(options, other.stream.publish, other.lost.set_result)
    # The link does not see the end of the stream: it must notice by itself.
    feeding = asyncio.create_task(other.stream.feed(reader.link.received))
    async with asyncio.timeout(WAIT_S):
        await reader.link.opened()
        reader.read(0, _READ_BYTES)
        assert await reader.all_ended() == {1: None}
        detail = await other.lost
    assert ("Timed out" in detail) == (action == "SIGSTOP"), detail
    feeding.cancel()
    await asyncio.wait([feeding])
    await reader.link.close()
    wait_until_none(_link_threads)
    # The target belongs to another handoff now, and the sender goes on.
    reader.memory[:] = b"\7" * MEMORY_BYTES
    if action == "SIGSTOP":
        signal.pidfd_send_signal(other.process, signal.SIGCONT)
    assert await other.kill() == -signal.SIGKILL
    assert reader.memory == b"\7" * MEMORY_BYTES


@pytest.mark.parametrize("action", ["SIGSTOP", "SIGKILL"])
async def test_a_receiver_that_falls_silent_within_a_read(remote, action):
    other = await remote("receiver", action)
    options = LinkOptions("gloo", "127.0.0.1", open_timeout_s=WAIT_S, frame_timeout_s=1.0)
    memory = bytearray(MEMORY_BYTES)
    link = SendingLink(options, other.stream.publish, other.lost.set_result, memoryview(memory))
    feeding = asyncio.create_task(other.stream.feed(link.received))
    async with asyncio.timeout(WAIT_S):
        await link.opened()
        # More than the connection holds: the receiver takes nothing more.
        while not other.lost.done():
            link.received(asked(0, PART_BYTES))
            await asyncio.sleep(0.05)
    feeding.cancel()
    await asyncio.wait([feeding], timeout=WAIT_S)
    await link.close()
    wait_until_none(_link_threads)
    # The peer still exists: this end did not have to wait for it.
    assert await other.kill() == -signal.SIGKILL


@pytest.mark.parametrize("role", ["sender", "receiver"])
async def test_a_process_can_leave_with_a_read_begun(remote, role):
    other = await remote(role, "leave")
    if role == "receiver":
        link = SendingLink(
            OPTIONS,
            other.stream.publish,
            other.lost.set_result,
            memoryview(bytearray(MEMORY_BYTES)),
        )
    else:
        reader = Reader(OPTIONS, other.stream.publish, other.lost.set_result)
        link = reader.link
    # A sending end here is not told of the read, so the peer's receive stays begun.
    feeding = asyncio.create_task(
        other.stream.feed(
            lambda message: None if message.HasField("read") else link.received(message)
        )
    )
    async with asyncio.timeout(WAIT_S):
        await link.opened()
        if role == "sender":
            reader.read(0, _READ_BYTES)
            assert await reader.all_ended() == {1: None}
        assert await other.ends() == 0
    feeding.cancel()
    await asyncio.wait([feeding])
    await link.close()


if __name__ == "__main__":
    peers()
