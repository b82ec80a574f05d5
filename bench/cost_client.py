"""Clients with little CPU cost for hundreds of requests, over one session or single streams."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from baton.bench.cost_answers import BATCH_TAG, prefix
from baton.runtime.closing import AsyncClosing
from baton.runtime.network import rpc
from baton.runtime.security.dial import PLAIN, Dial
from baton.v1 import common_pb2, inference_pb2

# Largest number of submissions in one message.
MAX_BATCH = 64
# Number of single streams that share a connection.
STREAMS_PER_CONNECTION = 32


@dataclass(slots=True)
class Seen:
    """Measurements of a client, in seconds.

    Attributes:
        num_requests: Requests that have ended.
        num_tokens: Tokens that have arrived.
    """

    num_requests: int = 0
    num_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class PendingRequest:
    """A request that has not ended."""

    sent_at: float
    done: asyncio.Future[None]
    num_tokens: int = 0
    last_at: float = 0.0


def traceparent(slot: int) -> str:
    """Returns the W3C traceparent header of a sampled request."""
    return f"00-{slot + 1:032x}-{slot + 1:016x}-01"


def generate_request(
    slot: int, num_prompt_tokens: int, num_tokens: int, *, traced: bool = False
) -> inference_pb2.GenerateRequest:
    """Returns a request without an ID; the coordinator assigns one."""
    prompt = [(slot * 31 + index * 17) % 50_000 for index in range(num_prompt_tokens)]
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        traceparent=traceparent(slot) if traced else "",
    )


class _CheckingClient:
    """Base of the gRPC clients: checks that every request gets all of its tokens, in order."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.seen = Seen()

    def token(self, pending: PendingRequest, delta: common_pb2.TokenDelta, now: float) -> None:
        if delta.offset != pending.num_tokens:
            raise RuntimeError(f"offset {delta.offset} after {pending.num_tokens} tokens")
        if pending.num_tokens:
            self.seen.gaps_s.append(now - pending.last_at)
        else:
            self.seen.ttfts_s.append(now - pending.sent_at)
        pending.last_at = now
        count = len(delta.token_ids)
        pending.num_tokens += count
        self.seen.num_tokens += count

    def end(self, pending: PendingRequest) -> None:
        if pending.num_tokens != self._num_tokens:
            raise RuntimeError(f"{pending.num_tokens} of {self._num_tokens} tokens")
        self.seen.num_requests += 1


class SessionClient(_CheckingClient):
    """Sends all requests over one Session call.

    Args:
        address: host:port.
        num_slots: Largest number of requests at a time.
        num_prompt_tokens: Prompt tokens of each request.
        num_tokens: Output tokens of each request.
        dial: TLS settings.
        traced: Whether the requests carry a traceparent.
    """

    def __init__(
        self,
        address: str,
        num_slots: int,
        num_prompt_tokens: int,
        num_tokens: int,
        dial: Dial = PLAIN,
        *,
        traced: bool = False,
    ) -> None:
        super().__init__(num_tokens)
        self._channel = rpc.channel(address, dial=dial)
        self._call: Any = self._channel.stream_stream(
            "/baton.v1.Inference/Session",
            response_deserializer=inference_pb2.SessionEvents.FromString,
        )(wait_for_ready=True)
        self._submissions = [
            inference_pb2.SessionRequest(
                submit=inference_pb2.Submit(
                    stream=slot,
                    request=generate_request(slot, num_prompt_tokens, num_tokens, traced=traced),
                )
            ).SerializeToString()
            for slot in range(num_slots)
        ]
        self._pending: dict[int, PendingRequest] = {}
        self._to_send: deque[int] = deque()
        self._posted = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def request(self, slot: int) -> None:
        pending = PendingRequest(time.perf_counter(), asyncio.get_running_loop().create_future())
        self._pending[slot] = pending
        self._to_send.append(slot)
        self._posted.set()
        await pending.done

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _write(self) -> None:
        """Sends waiting submissions as one message, as the client library does."""
        while True:
            await self._posted.wait()
            self._posted.clear()
            while self._to_send:
                found = [
                    self._submissions[self._to_send.popleft()]
                    for _ in range(min(MAX_BATCH, len(self._to_send)))
                ]
                if len(found) > 1:
                    found = [part for one in found for part in (prefix(BATCH_TAG, len(one)), one)]
                await self._call.write(b"".join(found))

    async def _read(self) -> None:
        try:
            while (batch := await self._call.read()) is not grpc.aio.EOF:
                now = time.perf_counter()
                for event in batch.events:
                    self._event(event, now)
            raise ConnectionError(await self._call.details())
        except Exception as error:
            for pending in self._pending.values():
                pending.done.set_exception(error)

    def _event(self, event: inference_pb2.SessionEvent, now: float) -> None:
        if event.HasField("delta"):
            self.token(self._pending[event.stream], event.delta, now)
        elif event.HasField("finished"):
            pending = self._pending.pop(event.stream)
            self.end(pending)
            pending.done.set_result(None)
        elif event.HasField("failed"):
            raise RuntimeError(event.failed.message)


class StreamsClient(_CheckingClient):
    """Sends one Generate call per request; the arguments are those of SessionClient."""

    def __init__(
        self, address: str, num_slots: int, num_prompt_tokens: int, num_tokens: int
    ) -> None:
        super().__init__(num_tokens)
        self._channels = [
            rpc.channel(address) for _ in range(-(-num_slots // STREAMS_PER_CONNECTION))
        ]
        self._calls: list[Any] = [
            channel.unary_stream(
                "/baton.v1.Inference/Generate",
                response_deserializer=inference_pb2.GenerateEvent.FromString,
            )
            for channel in self._channels
        ]
        self._requests = [
            generate_request(slot, num_prompt_tokens, num_tokens).SerializeToString()
            for slot in range(num_slots)
        ]

    async def request(self, slot: int) -> None:
        pending = PendingRequest(time.perf_counter(), asyncio.get_running_loop().create_future())
        call = self._calls[slot % len(self._calls)](self._requests[slot], wait_for_ready=True)
        while (event := await call.read()) is not grpc.aio.EOF:
            if event.HasField("delta"):
                self.token(pending, event.delta, time.perf_counter())
        self.end(pending)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


class Client(Protocol):
    """Sends requests and records the answers in `seen`. A slot has one request at a time."""

    seen: Seen

    async def request(self, slot: int) -> None:
        """Sends one request and waits until the request has ended."""
        ...

    async def close(self) -> None: ...


async def wave(client: Client, num_slots: int) -> None:
    """Sends one request per slot at the same time and waits until all have ended."""
    await asyncio.gather(*map(client.request, range(num_slots)))


class Loop(AsyncClosing):
    """Closed loop: each slot sends its next request when its last one has ended.

    The first requests of the slots are spread over `spread_s` seconds.
    """

    def __init__(self, client: Client, num_slots: int, spread_s: float) -> None:
        self._client = client
        self._tasks = [
            asyncio.create_task(self._repeat(slot, spread_s * slot / num_slots))
            for slot in range(num_slots)
        ]

    async def _repeat(self, slot: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while True:
            await self._client.request(slot)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def run(self, seconds: float) -> None:
        """Lets the loop run for this many seconds; raises the error of a failed request."""
        done, _ = await asyncio.wait(
            self._tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in done:
            task.result()
