"""A worker that uses the real Cluster.Attach over loopback, controlled by a test."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc

from baton.runtime.network import rpc
from baton.runtime.prompts.request_digest import request_digest
from baton.v1 import cluster_pb2, cluster_pb2_grpc, common_pb2

WAIT_S = 60.0


def add_running(hello, attempt, token_ids, prompt, sampling, tenant):
    """Adds the output of request r1 to a Hello: each token has one letter of text."""
    hello.running.add(
        request_id="r1",
        attempt=attempt,
        role=common_pb2.ROLE_DECODE,
        token_ids=token_ids,
        num_text_chars=len(token_ids),
        decoding=True,
        digest=request_digest(prompt, sampling),
        tenant=tenant,
    )


class ScriptedWorker:
    """One incarnation of a worker; `commands` contains the received commands, in order.

    With `auto` it serves requests: each step outputs one token, whose ID is its offset, up to
    max_tokens.
    """

    def __init__(
        self,
        address: str,
        hello: cluster_pb2.Hello,
        *,
        auto: bool = True,
        max_received_bytes: int | None = None,
    ) -> None:
        self.hello, self.auto = hello, auto
        self.commands: asyncio.Queue = asyncio.Queue()
        self.welcome: cluster_pb2.Welcome | None = None
        self.acked = 0
        self.received = 0
        self.seq = 0
        self.kept: list[cluster_pb2.WorkerMessage] = []
        # Sizes of the received batches.
        self.batches: list[int] = []
        self.drained = asyncio.Event()
        # gRPC allows only one write at a time.
        self._writing = asyncio.Lock()
        self._channel = rpc.channel(address, max_received_bytes=max_received_bytes)
        self._stub = cluster_pb2_grpc.ClusterStub(self._channel)
        self._call = None
        self._reader: asyncio.Task | None = None

    async def connect(self) -> None:
        """Opens a stream, and replays unacknowledged messages."""
        self._call = self._stub.Attach()
        self.hello.generation = self.welcome.generation if self.welcome else 0
        self.hello.ack = self.received
        async with asyncio.timeout(WAIT_S):
            await self._call.write(cluster_pb2.WorkerMessage(hello=self.hello))
            first = await self._call.read()
        if first is grpc.aio.EOF:
            raise AssertionError((await self._call.code(), await self._call.details()))
        assert first.HasField("welcome")
        self.welcome = first.welcome
        self.acked = first.welcome.ack
        for message in self.kept:
            if message.seq > self.acked:
                await self._call.write(message)
        self._reader = asyncio.create_task(self._read())

    async def disconnect(self) -> None:
        """Breaks the stream like a lost connection; the worker continues."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def close(self) -> None:
        if self._reader is not None:
            await self.disconnect()
        await self._channel.close()

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        """Status with which the coordinator ended the stream."""
        async with asyncio.timeout(WAIT_S):
            return await self._call.code(), await self._call.details()

    async def command(self, kind: str):
        """Returns the next command; fails if it has another kind."""
        async with asyncio.timeout(WAIT_S):
            message = await self.commands.get()
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    async def say(self, **message) -> None:
        """Sends a message (step=, handoff=, state_changed=) and keeps it until acknowledged."""
        self.seq += 1
        kept = cluster_pb2.WorkerMessage(seq=self.seq, ack=self.received, **message)
        self.kept.append(kept)
        await self.raw(kept)

    async def load(self, **load) -> None:
        report = cluster_pb2.LoadReport(**load)
        await self.raw(cluster_pb2.WorkerMessage(ack=self.received, load=report))

    async def step(self, *outputs) -> None:
        await self.say(step=cluster_pb2.StepOutputs(outputs=outputs))

    async def raw(self, message: cluster_pb2.WorkerMessage) -> None:
        async with self._writing:
            await self._call.write(message)

    async def leave(self) -> None:
        """Reports that the worker stops, and ends the stream."""
        change = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_STOPPED)
        await self.say(state_changed=change)
        await self._call.done_writing()

    async def _read(self) -> None:
        while (message := await self._call.read()) is not grpc.aio.EOF:
            self.acked = max(self.acked, message.ack)
            if message.batch:
                self.batches.append(len(message.batch))
            for one in message.batch or [message]:
                if one.seq:
                    assert one.seq == self.received + 1
                    self.received = one.seq
                    self.commands.put_nowait(one)
                    if self.auto:
                        await self._serve(one)

    async def _serve(self, message: cluster_pb2.CoordinatorMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "prefill":
            spec = message.prefill.spec
            last = spec.sampling.max_tokens == 1
            reason = common_pb2.FINISH_REASON_LENGTH if last else 0
            await self.step(answer(spec, 0, 1, reason))
        elif kind == "decode":
            spec = message.decode.spec
            known, count = len(spec.known_token_ids), spec.sampling.max_tokens
            for offset in range(known, count):
                last = offset == count - 1
                reason = common_pb2.FINISH_REASON_LENGTH if last else None
                await self.step(answer(spec, offset, 1, reason))
        elif kind == "drain":
            self.drained.set()


def answer(
    spec: cluster_pb2.RequestSpec, offset: int, count: int, reason: int | None = None
) -> cluster_pb2.RequestOutput:
    """Builds an output in which each token ID is its offset and each token's text is one letter."""
    tokens = range(offset, offset + count)
    output = cluster_pb2.RequestOutput(request_id=spec.request_id, attempt=spec.attempt)
    output.delta.CopyFrom(common_pb2.TokenDelta(offset=offset, token_ids=tokens, text="x" * count))
    if reason is not None:
        output.finished.reason = reason
        output.finished.SetInParent()
    return output


@asynccontextmanager
async def attached(address: str, *hellos: cluster_pb2.Hello, auto: bool = True):
    """Connects workers, and closes them at the end."""
    workers = [ScriptedWorker(address, hello, auto=auto) for hello in hellos]
    try:
        for worker in workers:
            await worker.connect()
        yield workers
    finally:
        for worker in workers:
            await worker.close()
