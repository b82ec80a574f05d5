"""Transfer services that are killed or stopped while fetches are in every state.

A relay between the two workers stops each fetch in its state. Then the service of the holder or of
the reader is killed or stopped once, so that one fault meets fetches in all states.
"""

import asyncio
import contextlib
import secrets
import signal
import threading
from dataclasses import dataclass, field

import psutil
import pytest

from baton.engine.sim_tokens import expected_tokens
from baton.kvtransfer import frames
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from tests.vllm.vllm_relay import HOLD_TIMEOUT_S, Relay, over_the_wire
from tests.vllm.worker_parts import stopped
from tests.worker.scripted_coordinator import (
    WAIT_S,
    ScriptedCoordinator,
    plan,
    send_prefix,
    spec,
    tokens_of,
)

DECODE = common_pb2.ROLE_DECODE
COMMITTED = kv_transfer_pb2.HANDOFF_STATE_COMMITTED
RELEASED = kv_transfer_pb2.HANDOFF_STATE_RELEASED
FAILED = kv_transfer_pb2.HANDOFF_STATE_FAILED
BLOCK, TURN = 16, 100
HELD = TURN // BLOCK * BLOCK
# Tokens of the beginning that the reader has on its device, if it has any.
OWN = 2 * BLOCK
ANSWER = 6
RELAY_HOST = "127.0.0.2"
# Time after which the reader gives up a fetch whose other end is stopped.
GIVEN_UP_S = 0.2
# Frames that pass before the relay holds the fetch: the open, a frame for each of 4 layers, and the
# commit. "verified": the reader's service has committed the fetch, and its request has not come.
# "loaded": the request runs.
NUM_PASSED = {"asked": 0, "granted": 1, "under way": 3, "sent": 5, "verified": 99, "loaded": 99}
UNFINISHED = ("asked", "granted", "under way", "sent")


@dataclass(eq=False)
class Fetch:
    """One fetch, which the relay holds in a state."""

    state: str
    transport: str
    number: int
    handoff_id: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    reached: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self):
        return f"{self.state}, {self.transport}"

    @property
    def prompt(self):
        first = 5 + self.number
        return [first, *(3 + index % 90 for index in range(TURN + 20))]

    @property
    def skip_tokens(self):
        return OWN if self.transport == "shm" else 0

    def plan(self, timeout_s=WAIT_S):
        made = cluster_pb2.FetchPlan(
            handoff_id=self.handoff_id, num_tokens=HELD, skip_tokens=self.skip_tokens
        )
        made.timeout.FromMicroseconds(round(timeout_s * 1e6))
        return made


class HoldEach:
    """Passes as many frames of each fetch as its state says, and holds the others."""

    def __init__(self, fetches):
        self._fetches = {one.handoff_id: one for one in fetches}
        self._num_left = {one.handoff_id: NUM_PASSED[one.state] for one in fetches}
        self._let_go = threading.Event()

    def __call__(self, message):
        (first, *_) = frames.decode(message)
        if (fetch := self._fetches.get(first.handoff_id)) is None:
            yield message
            return
        if fetch.transport == "grpc":
            message = over_the_wire(message)
        end = 0
        for frame in frames.decode(message):
            begin, end = end, end + frames.HEADER_BYTES + len(frame.payload)
            if not self._num_left[fetch.handoff_id]:
                fetch.reached.set()
                self._let_go.wait(HOLD_TIMEOUT_S)
            else:
                self._num_left[fetch.handoff_id] -= 1
            yield message[begin:end]

    def let_go(self):
        self._let_go.set()


def service_at(address):
    """Returns the transfer service, a child of this process, that listens on a port."""
    port = int(address.rpartition(":")[2])
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if port in {one.laddr.port for one in process.net_connections("tcp")}:
                return process
    raise AssertionError(f"no transfer service listens on {address}")


class Workers:
    """A holder and a reader, each with its own coordinator, and the relay between them."""

    def __init__(self, start_worker, vocabulary, stack):
        self._start, self._vocabulary, self._stack = start_worker, vocabulary, stack
        self.relay = None

    async def start(self, name):
        """Starts a worker; returns its coordinator, stream and running worker."""
        own = ScriptedCoordinator()
        await own.start()
        self._stack.push_async_callback(own.stop)
        running = self._start(
            DECODE,
            name,
            address=own.address,
            simulated={"kv_tokens": 4096},
            kv_transfer={"listen": "127.0.0.1:0", "advertise_host": RELAY_HOST},
        )
        return own, await own.stream(), running

    async def start_reader(self, name):
        """Starts the reader behind a relay."""
        self.reader = await self.start(name)
        if self.relay is not None:
            self.relay.close()
        address = self.reader[1].hello.kv_address
        self.relay = Relay(address, f"127.0.0.1:{address.rpartition(':')[2]}")
        self._stack.callback(self.relay.close)

    def expected(self, prompt, count):
        return expected_tokens(self._vocabulary, prompt, count)

    async def computes(self, which, name, prompt):
        coordinator, stream, _ = which
        command = cluster_pb2.DecodeCommand(spec=spec(name, prompt, max_tokens=1))
        await coordinator.command(stream, decode=command)
        assert tokens_of(await stream.outputs(name)) == self.expected(prompt, 1)

    async def hold(self, fetches):
        """The holder has the prompts, and sends them as far as the relay lets it."""
        self.relay.spoil = holding = HoldEach(fetches)
        coordinator, stream, _ = self.holder
        for one in fetches:
            await self.computes(self.holder, f"turn {one.name}", one.prompt[:TURN])
            if one.skip_tokens:
                await self.computes(self.reader, f"own {one.name}", one.prompt[: OWN + 1])
            handoff = plan(one.handoff_id, self.reader[1].hello.kv_address, HELD)
            handoff.skip_tokens = one.skip_tokens
            command = send_prefix(one.prompt, handoff)
            await coordinator.command(stream, send_prefix=command)
        return holding

    async def reads(self, fetches, timeout_s=WAIT_S):
        """Tells the reader to compute requests that wait for fetches."""
        coordinator, stream, _ = self.reader
        commands = [
            cluster_pb2.DecodeCommand(
                spec=spec(one.name, one.prompt, max_tokens=ANSWER), fetch=one.plan(timeout_s)
            )
            for one in fetches
        ]
        await coordinator.command_batch(stream, *({"decode": one} for one in commands))

    async def drop(self, one):
        """Tells the reader not to wait, as the coordinator does when it has lost the holder."""
        coordinator, stream, _ = self.reader
        cancel = cluster_pb2.CancelCommand(request_id=one.name, handoff_id=one.handoff_id)
        await coordinator.command(stream, cancel=cancel)

    async def reports(self, which, state, fetches):
        """Waits until a worker has reported that each fetch is in a state."""
        wanted = {one.handoff_id for one in fetches}
        while wanted:
            report = (await which[1].next_of("handoff")).handoff
            assert report.state == state, report
            wanted.discard(report.handoff_id)

    async def check(self, fetches, loaded):
        """Every stream is right, and only these states have loaded what was fetched."""
        outputs = {one.name: [] for one in fetches}
        while any(not got or got[-1].WhichOneof("end") is None for got in outputs.values()):
            for output in (await self.reader[1].next_of("step")).step.outputs:
                if output.request_id in outputs:
                    outputs[output.request_id].append(output)
        for one in fetches:
            got = outputs[one.name]
            assert tokens_of(got) == self.expected(one.prompt, ANSWER), one.name
            timings = got[0].timings
            fetched = HELD - one.skip_tokens if one.state in loaded else 0
            # Without the fetch too, the reader uses the blocks that it has itself.
            found = timings.num_fetched_tokens, timings.num_cached_tokens
            assert found == (fetched, one.skip_tokens), one.name


@pytest.fixture
async def workers(start_worker, vocabulary):
    async with contextlib.AsyncExitStack() as stack:
        made = Workers(start_worker, vocabulary, stack)
        made.holder = await made.start("h")
        await made.start_reader("r")
        yield made


@pytest.fixture
async def held(workers):
    """Fetches by shared memory and by gRPC in each state."""
    kinds = [(state, transport) for state in NUM_PASSED for transport in ("shm", "grpc")]
    fetches = [Fetch(*kind, number) for number, kind in enumerate(kinds)]
    holding = await workers.hold(fetches)
    await workers.reports(workers.holder, COMMITTED, of(fetches, "verified", "loaded"))
    # The engine runs few steps ahead of its outputs, so that these requests do not end.
    workers.reader[2].hold_outputs()
    await workers.reads(of(fetches, "loaded"))
    await workers.reports(workers.reader, RELEASED, of(fetches, "loaded"))
    for one in of(fetches, *UNFINISHED):
        assert await asyncio.to_thread(one.reached.wait, WAIT_S), one.name
    yield fetches
    holding.let_go()


def of(fetches, *states):
    return [one for one in fetches if one.state in states]


async def test_the_holder_s_service_is_killed(workers, held):
    await workers.reads(of(held, *UNFINISHED))
    service_at(workers.holder[1].hello.kv_address).send_signal(signal.SIGKILL)
    assert await workers.holder[2].exit_code() != 0
    for one in of(held, *UNFINISHED):
        await workers.drop(one)
    await workers.reads(of(held, "verified"))
    workers.reader[2].release_outputs()
    await workers.check(held, ("verified", "loaded"))
    await workers.reader[1].idle()


async def test_the_reader_s_service_is_killed(workers, held):
    await workers.reads(of(held, *UNFINISHED))
    service_at(workers.reader[1].hello.kv_address).send_signal(signal.SIGKILL)
    workers.reader[2].release_outputs()
    assert await workers.reader[2].exit_code() != 0
    await workers.reports(workers.holder, FAILED, of(held, *UNFINISHED))
    await workers.holder[1].idle()
    # The holder still has everything, and another reader gets it.
    await workers.start_reader("r2")
    again = [Fetch("loaded", transport, 50 + n) for n, transport in enumerate(("shm", "grpc"))]
    await workers.hold(again)
    await workers.reads(again)
    await workers.check(again, ("loaded",))
    await workers.reader[1].idle()
    await workers.holder[1].idle()


async def test_the_holder_s_service_is_stopped(workers, held):
    with stopped([service_at(workers.holder[1].hello.kv_address)]):
        await workers.reads(of(held, *UNFINISHED), GIVEN_UP_S)
        await workers.reads(of(held, "verified"))
        workers.reader[2].release_outputs()
        await workers.check(held, ("verified", "loaded"))
        await workers.reader[1].idle()
    await workers.holder[1].idle()


async def test_the_reader_s_service_is_stopped(workers, held):
    with stopped([service_at(workers.reader[1].hello.kv_address)]):
        await workers.reads(of(held, *UNFINISHED, "verified"), GIVEN_UP_S)
        workers.reader[2].release_outputs()
        # Staging cannot be claimed now, not even that of a verified fetch.
        await workers.check(held, ("loaded",))
    await workers.reader[1].idle()
    await workers.holder[1].idle()
