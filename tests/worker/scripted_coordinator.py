"""A scripted coordinator on a real gRPC server, and workers on the simulated engine."""

import asyncio
import contextlib
from collections.abc import Sequence

import grpc

from baton.engine.base import Engine
from baton.runtime.config import BatonConfig, PoolConfig
from baton.runtime.network import rpc
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import cluster_pb2, cluster_pb2_grpc, common_pb2
from baton.worker.main import make_engine, serve

# Longest wait for an event that must happen; long enough for a busy machine.
WAIT_S = 120.0
_HEARTBEAT_S = 0.02


class Stream:
    """One Attach call, seen from its coordinator."""

    def __init__(
        self,
        coordinator: "ScriptedCoordinator",
        context: grpc.aio.ServicerContext,
        hello: cluster_pb2.Hello,
    ) -> None:
        self.hello = hello
        self.ended = asyncio.Event()
        self.heard = asyncio.Event()
        self.acks = 0
        self._coordinator = coordinator
        self._context = context
        self._load = cluster_pb2.LoadReport()
        self._num_loads = 0
        self._inbox: asyncio.Queue[cluster_pb2.WorkerMessage] = asyncio.Queue()
        self.end_with: tuple[grpc.StatusCode, str] | None = None
        self._end = asyncio.Event()
        self._writing = asyncio.Lock()
        self._silent = asyncio.Event()
        # Messages that a call of next_of has passed over.
        self._others: list[cluster_pb2.WorkerMessage] = []

    async def pump(self) -> None:
        coordinator = self._coordinator
        while (message := await self._context.read()) is not grpc.aio.EOF:
            self.acks = max(self.acks, message.ack)
            if message.batch:
                coordinator.batches.append(len(message.batch))
            if message.HasField("load"):
                self._load = message.load
                self._num_loads += 1
            for one in message.batch or [message]:
                if one.seq:
                    assert one.seq == coordinator.received + 1, "a message is missing or doubled"
                    coordinator.received = one.seq
                    self._inbox.put_nowait(one)
            self.heard.set()
        self.ended.set()

    async def send(self, **command: object) -> None:
        async with self._writing:
            await self._context.write(cluster_pb2.CoordinatorMessage(**command))

    async def run(self) -> None:
        pump = asyncio.create_task(self.pump())
        end = asyncio.create_task(self._end.wait())
        heartbeats = asyncio.create_task(self._send_heartbeats())
        await asyncio.wait([pump, end], return_when=asyncio.FIRST_COMPLETED)
        for task in (pump, end):
            task.cancel()
        # gRPC cannot send a status after a write that was cancelled, so the heartbeats end alone.
        self.fall_silent()
        await asyncio.gather(pump, end, heartbeats, return_exceptions=True)
        self.ended.set()

    async def _send_heartbeats(self) -> None:
        while not self._silent.is_set():
            await self.send()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT_S):
                    await self._silent.wait()

    def fall_silent(self) -> None:
        """Sends no more heartbeats; the stream stays open."""
        self._silent.set()

    def end(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE, details: str = "") -> None:
        """Ends the stream from the coordinator's side."""
        self.end_with = (code, details)
        self._end.set()

    async def next(self, kind: str) -> cluster_pb2.WorkerMessage:
        """Next numbered message, which must be of this kind."""
        async with asyncio.timeout(WAIT_S):
            message = await self._inbox.get()
        assert message.WhichOneof("message") == kind, message
        return message

    async def next_of(self, kind: str) -> cluster_pb2.WorkerMessage:
        """Next numbered message of this kind; others stay for later calls.

        A busy machine decides, for example, whether a handoff fails before its request's output.
        """
        for message in self._others:
            if message.WhichOneof("message") == kind:
                self._others.remove(message)
                return message
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self._inbox.get()
                if message.WhichOneof("message") == kind:
                    return message
                self._others.append(message)

    async def outputs(self, request_id: str) -> list[cluster_pb2.RequestOutput]:
        """All outputs of a request up to its end."""
        found: list[cluster_pb2.RequestOutput] = []
        while not found or found[-1].WhichOneof("end") is None:
            step = (await self.next_of("step")).step
            found += [output for output in step.outputs if output.request_id == request_id]
        return found

    async def idle(self) -> None:
        """Waits for a load report without requests and reserved memory."""
        load = await self.load_after()
        while (
            load.num_running or load.num_waiting or load.kv_tokens_used or load.staging_bytes_used
        ):
            load = await self._load_number(self._num_loads + 1)

    async def load_after(self) -> cluster_pb2.LoadReport:
        """A load report that is made after this call."""
        # The worker knows no such request.
        cancel = cluster_pb2.CancelCommand(request_id="made for its acknowledgement", attempt=1)
        await self._coordinator.command(self, cancel=cancel)
        seq = self._coordinator.sent
        async with asyncio.timeout(WAIT_S):
            while self.acks < seq:
                self.heard.clear()
                await self.heard.wait()
        # The worker may have had a report to send, and another half made, when it got the command.
        return await self._load_number(self._num_loads + 3)

    async def loads(self, count: int) -> None:
        """Waits for so many more load reports."""
        await self._load_number(self._num_loads + count)

    async def _load_number(self, number: int) -> cluster_pb2.LoadReport:
        async with asyncio.timeout(WAIT_S):
            while self._num_loads < number:
                self.heard.clear()
                await self.heard.wait()
        return self._load


class ScriptedCoordinator(cluster_pb2_grpc.ClusterServicer):
    """Welcomes workers; the test sends all other messages."""

    def __init__(self, generation: int = 1, grace_s: float = 30.0) -> None:
        self.generation, self.grace_s = generation, grace_s
        self.received = 0
        self.sent = 0
        self.adopted: Sequence[cluster_pb2.AdoptedRequest] = ()
        # Number of messages in each batch of more than one.
        self.batches: list[int] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        # Set when a worker was refused.
        self.refused = asyncio.Event()
        self.address = ""
        self.step_targets: cluster_pb2.StepTargets | None = None
        self._streams: asyncio.Queue[Stream] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        self._server = rpc.server(max_sent_bytes=64 * 2**20)
        cluster_pb2_grpc.add_ClusterServicer_to_server(self, self._server)
        self.address = rpc.bind(self._server, listen, "listen")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def Attach(self, request_iterator, context):
        del request_iterator
        hello = (await context.read()).hello
        if self.refusal is not None:
            self.refused.set()
            await context.abort(*self.refusal)
        welcome = cluster_pb2.Welcome(
            generation=self.generation,
            ack=self.received,
            adopted=self.adopted,
            step_targets=self.step_targets,
        )
        welcome.heartbeat_interval.FromMicroseconds(round(_HEARTBEAT_S * 1e6))
        welcome.adoption_grace.FromMicroseconds(round(self.grace_s * 1e6))
        stream = Stream(self, context, hello)
        await stream.send(welcome=welcome)
        self._streams.put_nowait(stream)
        await stream.run()
        if stream.end_with is not None:
            await context.abort(*stream.end_with)

    async def stream(self) -> Stream:
        """Stream of the next worker that attaches."""
        async with asyncio.timeout(WAIT_S):
            return await self._streams.get()

    async def command(self, stream: Stream, **command: object) -> None:
        """Sends a numbered command."""
        self.sent += 1
        await stream.send(seq=self.sent, ack=self.received, **command)

    async def command_batch(self, stream: Stream, *commands: dict[str, object]) -> None:
        """Sends numbered commands in one message, so that the worker gets them at the same time."""
        batch = []
        for command in commands:
            self.sent += 1
            batch.append(cluster_pb2.CoordinatorMessage(seq=self.sent, **command))
        await stream.send(ack=self.received, batch=batch)


class RunningWorker:
    """A worker (`serve`) in this process, with its transfer service in another process."""

    def __init__(self, config: BatonConfig, role: int, address: str, worker_id: str) -> None:
        self.stop = asyncio.Event()
        self._engine: Engine | None = None
        self._step_targets: asyncio.Queue[StepTargets] = asyncio.Queue()
        self._may_output = asyncio.Event()
        self._may_output.set()
        running = serve(
            config, role, address, worker_id, stop=self.stop, engine_factory=self._make_engine
        )
        self.task = asyncio.create_task(running, name=worker_id)

    def _make_engine(self, config: BatonConfig, pool: PoolConfig, transfer_socket: str) -> Engine:
        engine = self._engine = make_engine(config, pool, transfer_socket)
        next_step = engine.next_step

        async def held_step():
            step = await next_step()
            await self._may_output.wait()
            return step

        set_step_targets = engine.set_step_targets

        def recorded_targets(targets: StepTargets) -> None:
            set_step_targets(targets)
            self._step_targets.put_nowait(targets)

        engine.next_step, engine.set_step_targets = held_step, recorded_targets
        return engine

    @property
    def engine(self) -> Engine:
        """Engine of this worker, once it is attached."""
        assert self._engine is not None
        return self._engine

    async def step_targets_are(self, expected: StepTargets) -> None:
        """Waits until the engine gets other targets, which must be these."""
        async with asyncio.timeout(WAIT_S):
            assert await self._step_targets.get() == expected

    def hold_outputs(self) -> None:
        """Keeps the engine's outputs back until `release_outputs`, so that no request ends."""
        self._may_output.clear()

    def release_outputs(self) -> None:
        self._may_output.set()

    async def exit_code(self) -> int:
        async with asyncio.timeout(WAIT_S):
            return await asyncio.shield(self.task)

    async def computes_nothing(self) -> None:
        """Waits until no request runs in the engine."""
        assert self._engine is not None
        async with asyncio.timeout(WAIT_S):
            while self._engine.take_load().num_running:
                await asyncio.sleep(0.01)


async def end_worker(worker: RunningWorker) -> None:
    worker.stop.set()
    worker.task.cancel()
    await asyncio.gather(worker.task, return_exceptions=True)


def spec(
    name: str,
    prompt: Sequence[int],
    *,
    attempt: int = 1,
    known: Sequence[int] = (),
    timeout_s: float | None = None,
    **sampling: object,
) -> cluster_pb2.RequestSpec:
    made = cluster_pb2.RequestSpec(
        request_id=name,
        attempt=attempt,
        prompt_token_ids=prompt,
        known_token_ids=known,
        sampling=common_pb2.SamplingParams(**sampling),
    )
    if timeout_s is not None:
        made.timeout.FromMicroseconds(round(timeout_s * 1e6))
    return made


def plan(
    handoff_id: bytes, target: str, num_tokens: int, commit_timeout_s: float = WAIT_S
) -> cluster_pb2.HandoffPlan:
    made = cluster_pb2.HandoffPlan(handoff_id=handoff_id, target=target, num_tokens=num_tokens)
    made.commit_timeout.FromMicroseconds(round(commit_timeout_s * 1e6))
    return made


def send_prefix(
    prompt: Sequence[int], handoff: cluster_pb2.HandoffPlan
) -> cluster_pb2.SendPrefixCommand:
    made = cluster_pb2.SendPrefixCommand(
        handoff=handoff, prompt_token_ids=prompt[: handoff.num_tokens]
    )
    made.timeout.FromMicroseconds(round(WAIT_S * 1e6))
    return made


def tokens_of(outputs: Sequence[cluster_pb2.RequestOutput]) -> list[int]:
    """Tokens of the outputs; checks that the offsets are contiguous."""
    found: list[int] = []
    start = outputs[0].delta.offset
    for output in outputs:
        if output.delta.token_ids:
            assert output.delta.offset == start + len(found)
        found += output.delta.token_ids
    return found
