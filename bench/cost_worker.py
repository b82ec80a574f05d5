"""Scripted workers with almost no CPU cost: prepared answers over the real Cluster.Attach.

`python -m baton.bench.cost_worker --help`. One process plays a prefill worker and decode workers;
each answers prompts at once and also decodes, as workers of an elastic cell do. With --listen the
process serves Inference directly, without a coordinator, with the same answers at the same pace.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from baton.bench import cost_answers
from baton.bench.cost_answers import MODEL, VOCAB_SIZE, Answers, Token
from baton.runtime.network import rpc
from baton.runtime.process import lifecycle
from baton.runtime.security.dial import PLAIN, Dial
from baton.runtime.security.tls import TlsFiles
from baton.v1 import cluster_pb2, common_pb2, inference_pb2, kv_transfer_pb2

MAX_MODEL_LEN = 8192
# Fields of StepTokens: the handle of the request, then the fields of Token.
_COLUMNS = ("handles", "offsets", "token_ids", "num_text_chars", "deltas")
# Field number and wire type of WorkerMessage.step.
_STEP_TAG = b"\x2a"


@dataclass(slots=True)
class Gate:
    """Delays the decoding of a wave until all requests of the wave have arrived (flat out runs).

    Attributes:
        num_wanted: Requests in a wave; 0: requests are not delayed.
    """

    num_wanted: int
    num_waiting: int = 0
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def enter(self) -> asyncio.Event:
        """Adds a request; returns an event that is set when the wave of this request may begin."""
        opened = self.opened
        self.num_waiting += 1
        if self.num_waiting >= self.num_wanted:
            self.num_waiting, self.opened = 0, asyncio.Event()
            opened.set()
        return opened


class Decoder:
    """A scripted decode engine: each step makes one token for every request.

    Args:
        step_s: Time from the start of one step to the next; 0: as fast as `send` returns.
        gate: Delays the first step of a wave.
        send: Sends the answers of a step: pairs of a request's handle or stream number and an
            encoded answer or a plain token.
    """

    def __init__(
        self,
        step_s: float,
        gate: Gate,
        send: Callable[[list[tuple[int, bytes | Token]]], Awaitable[None]],
    ) -> None:
        self._step_s, self._gate, self._send = step_s, gate, send
        self._live: dict[int, Iterator[bytes | Token]] = {}
        self._ends: defaultdict[int, list[int]] = defaultdict(list)
        self._opened = gate.opened
        self._added = asyncio.Event()
        self.num_steps = 0

    @property
    def num_live(self) -> int:
        return len(self._live)

    def add(self, name: int, answers: Sequence[bytes | Token]) -> None:
        """Adds a request; the request ends with its last answer."""
        self._live[name] = iter(answers)
        self._ends[self.num_steps + len(answers)].append(name)
        self._opened = self._gate.enter()
        self._added.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._added.wait()
            self._added.clear()
            await self._opened.wait()
            due = loop.time()
            while self._live:
                if self._step_s:
                    due = max(due + self._step_s, loop.time())
                    await asyncio.sleep(due - loop.time())
                self.num_steps += 1
                step = list(zip(self._live, map(next, self._live.values()), strict=True))
                for name in self._ends.pop(self.num_steps, ()):
                    del self._live[name]
                await self._send(step)


class Attachment:
    """One worker's stream to the coordinator."""

    def __init__(
        self,
        address: str,
        worker_id: str,
        role: common_pb2.Role.ValueType,
        dial: Dial = PLAIN,
        tokenizer: str = "",
    ) -> None:
        self._hello = hello(worker_id, role, tokenizer)
        attach: Any = rpc.channel(address, dial=dial).stream_stream(
            "/baton.v1.Cluster/Attach",
            request_serializer=None,
            response_deserializer=cluster_pb2.CoordinatorMessage.FromString,
        )
        self._call: Any = attach(wait_for_ready=True)
        self._writing = asyncio.Lock()
        self._seq = self._received = 0

    async def open(self) -> None:
        await self._write(cluster_pb2.WorkerMessage(hello=self._hello))
        message = await self._call.read()
        if message is grpc.aio.EOF:
            raise ConnectionError(await self._call.details())
        self._heartbeat_s = message.welcome.heartbeat_interval.ToMilliseconds() / 1e3

    async def commands(self) -> AsyncIterator[cluster_pb2.CoordinatorMessage]:
        while (message := await self._call.read()) is not grpc.aio.EOF:
            for one in message.batch or (message,):
                if one.seq:
                    self._received = one.seq
                    yield one

    async def step(self, outputs: bytes) -> None:
        self._seq += 1
        head = cluster_pb2.WorkerMessage(seq=self._seq)
        await self._write(head, cost_answers.prefix(_STEP_TAG, len(outputs)) + outputs)

    async def decoded(self, answers: list[tuple[int, bytes | Token]]) -> None:
        """Sends the answers of one decode step."""
        plain = [(name, *answer) for name, answer in answers if isinstance(answer, Token)]
        step = b"".join([answer for _, answer in answers if isinstance(answer, bytes)])
        if plain:
            columns = dict(zip(_COLUMNS, zip(*plain, strict=True), strict=True))
            tokens: Any = cluster_pb2.StepTokens
            step += cluster_pb2.StepOutputs(tokens=tokens(**columns)).SerializeToString()
        await self.step(step)

    async def report(self, decoder: Decoder | None = None) -> None:
        """Sends load reports until the task is cancelled."""
        while True:
            load = cluster_pb2.LoadReport()
            if decoder is not None:
                load.num_running, load.num_steps = decoder.num_live, decoder.num_steps
            await self._write(cluster_pb2.WorkerMessage(load=load))
            await asyncio.sleep(self._heartbeat_s)

    async def _write(self, head: cluster_pb2.WorkerMessage, rest: bytes = b"") -> None:
        # gRPC allows one write at a time per stream.
        async with self._writing:
            head.ack = self._received
            await self._call.write(head.SerializeToString() + rest)


def hello(
    worker_id: str, role: common_pb2.Role.ValueType, tokenizer: str = ""
) -> cluster_pb2.Hello:
    return cluster_pb2.Hello(
        worker_id=worker_id,
        incarnation=secrets.randbits(63) | 1,
        role=role,
        state=cluster_pb2.WORKER_STATE_SERVING,
        model=common_pb2.ModelDescription(
            name=MODEL, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, tokenizer=tokenizer
        ),
        fingerprint=kv_transfer_pb2.KvFingerprint(
            protocol_version=1, num_layers=4, block_size_tokens=16, block_bytes=1024, tp_size=1
        ),
        capacity=cluster_pb2.Capacity(
            kv_tokens=2**24,
            block_size_tokens=16,
            max_num_seqs=2048,
            max_num_batched_tokens=8192,
            max_send_bytes=2**40,
            max_receive_bytes=2**40,
            supports_forced_tokens=True,
        ),
        kv_address=f"{worker_id}.invalid:1",
        engine="scripted",
    )


def output_of(spec: cluster_pb2.RequestSpec) -> cluster_pb2.RequestOutput:
    return cluster_pb2.RequestOutput(request_id=spec.request_id, attempt=spec.attempt)


class WriteQueue:
    """Writes answers at once; answers that arrive during a write are sent together as one."""

    def __init__(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._write = write
        self._waiting: list[bytes] = []
        self._posted = asyncio.Event()

    def post(self, answers: Sequence[bytes]) -> None:
        self._waiting += answers
        self._posted.set()

    async def run(self) -> None:
        while True:
            await self._posted.wait()
            self._posted.clear()
            joined = b"".join(self._waiting)
            self._waiting.clear()
            await self._write(joined)


@dataclass(frozen=True, slots=True)
class Script:
    """Prepared answers of workers.

    Attributes:
        prompts: First tokens of prompts that are handed over or need no output.
        outputs: Tokens with details; a request's first answer has timings, its last the end.
        plain: The tokens between them.
    """

    prompts: Answers
    outputs: Answers
    plain: Sequence[Token]


async def work(worker: Attachment, decoder: Decoder, script: Script) -> None:
    """Serves one worker: answers prompts at once, and outputs at the decoder's pace."""
    queue = WriteQueue(worker.step)
    async with asyncio.TaskGroup() as group:
        group.create_task(queue.run())
        group.create_task(decoder.run())
        group.create_task(worker.report(decoder))
        async for message in worker.commands():
            if message.HasField("prefill"):
                queue.post(script.prompts.of(output_of(message.prefill.spec), 0, 1))
            elif message.HasField("decode"):
                spec = message.decode.spec
                num_known, num_all = len(spec.known_token_ids), spec.sampling.max_tokens
                output = output_of(spec)
                first, *_ = script.outputs.of(output, num_known, num_known + 1)
                last = script.outputs.of(output, max(num_known + 1, num_all - 1), num_all)
                between = script.plain[num_known + 1 : num_all - 1]
                decoder.add(spec.handle, [first, *between, *last])
        raise ConnectionError("the coordinator closed the stream of a worker")


async def attach(arguments: argparse.Namespace) -> int:
    """Serves a coordinator until the process is killed."""
    prompts, outputs = (
        cost_answers.worker_outputs(role, arguments.tokens)
        for role in (common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE)
    )
    script = Script(prompts, outputs, cost_answers.plain_tokens(arguments.tokens))
    gate = Gate(0 if arguments.step_ms else arguments.requests)
    address = arguments.coordinator
    dial = Dial(TlsFiles(arguments.tls_ca)) if arguments.tls_ca else PLAIN
    workers = [
        Attachment(address, "prefill-0", common_pb2.ROLE_PREFILL, dial, arguments.tokenizer),
        *(
            Attachment(
                address, f"decode-{number}", common_pb2.ROLE_DECODE, dial, arguments.tokenizer
            )
            for number in range(arguments.decode_workers)
        ),
    ]
    for worker in workers:
        await worker.open()
    print("ready", flush=True)
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            decoder = Decoder(arguments.step_ms / 1e3, gate, worker.decoded)
            group.create_task(work(worker, decoder, script))
    return 0


class DirectService:
    """Serves Inference without a coordinator: submissions go directly to a decoder."""

    def __init__(self, num_tokens: int, step_s: float) -> None:
        self._num_tokens, self._step_s = num_tokens, step_s
        self._session = cost_answers.session_events(num_tokens)
        self._single = cost_answers.generate_events(num_tokens)

    async def session(self, request_iterator: object, context: Any) -> None:
        del request_iterator
        writing = asyncio.Lock()

        async def send(events: bytes) -> None:
            async with writing:
                await context.write(events)

        async def decoded(answers: list[tuple[int, bytes | Token]]) -> None:
            await send(b"".join([one for _, one in answers if isinstance(one, bytes)]))

        decoder = Decoder(self._step_s, Gate(0), decoded)
        running = asyncio.create_task(decoder.run())
        try:
            while isinstance(message := await context.read(), inference_pb2.SessionRequest):
                for one in message.batch or (message,):
                    stream = one.submit.stream
                    event = inference_pb2.SessionEvent(stream=stream)
                    first, *rest = self._session.of(event, 0, self._num_tokens)
                    await send(first)
                    decoder.add(stream, rest)
        finally:
            running.cancel()

    async def generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        *tokens, end = self._single
        for token in tokens:
            await asyncio.sleep(max(0.0, due - loop.time()))
            due += self._step_s
            await context.write(token)
        await context.write(end)


async def serve(arguments: argparse.Namespace) -> int:
    """Serves clients until the process is killed."""
    service = DirectService(arguments.tokens, arguments.step_ms / 1e3)
    handlers: dict[str, Any] = {
        "Session": grpc.stream_stream_rpc_method_handler(
            service.session,
            inference_pb2.SessionRequest.FromString,
        ),
        "Generate": grpc.unary_stream_rpc_method_handler(
            service.generate,
            inference_pb2.GenerateRequest.FromString,
        ),
    }
    server = rpc.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("baton.v1.Inference", handlers)]
    )
    rpc.bind(server, arguments.listen, "--listen")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--coordinator", help="attach to this coordinator; host:port")
    where.add_argument("--listen", help="serve clients without a coordinator; host:port")
    parser.add_argument("--requests", type=int, default=0, help="requests per wave, flat out")
    parser.add_argument("--tokens", type=int, required=True, help="output tokens per request")
    parser.add_argument("--step-ms", type=float, required=True, help="0: flat out, in waves")
    parser.add_argument("--decode-workers", type=int, default=1)
    parser.add_argument("--tokenizer", default="", help="directory of the model's tokenizer")
    parser.add_argument("--tls-ca", default="", help="CA file for the coordinator's certificate")
    arguments = parser.parse_args()
    lifecycle.run(attach(arguments) if arguments.coordinator else serve(arguments))


if __name__ == "__main__":
    main()
