"""Clients that cost little: requests by the hundred, over one session or as single streams."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from baton.bench.cost_answers import BATCH_TAG, prefix
from baton.runtime import rpc
from baton.runtime.closing import AsyncClosing
from baton.runtime.dial import PLAIN, Dial
from baton.v1 import common_pb2, inference_pb2

# Submissions in one message.
MAX_BATCH = 64
# Single streams that share a connection.
STREAMS_PER_CONNECTION = 32


@dataclass(slots=True)
class Seen:
    """What clients saw since it was made, in seconds.

    Attributes:
        num_requests, num_tokens: that ended, and that came.
    """

    num_requests: int = 0
    num_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Asked:
    """One request that has not ended."""

    sent_at: float
    done: asyncio.Future[None]
    num_tokens: int = 0
    last_at: float = 0.0


def traceparent(slot: int) -> str:
    """Of a request whose caller wants its spans (W3C trace context)."""
    return f"00-{slot + 1:032x}-{slot + 1:016x}-01"


def generate_request(
    slot: int, num_prompt_tokens: int, num_tokens: int, *, traced: bool = False
) -> inference_pb2.GenerateRequest:
    """The coordinator makes up its id."""
    prompt = [(slot * 31 + index * 17) % 50_000 for index in range(num_prompt_tokens)]
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        traceparent=traceparent(slot) if traced else "",
    )


class _Tally:
    """Checks that every request gets all of its tokens, in order."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.seen = Seen()

    def token(self, asked: Asked, delta: common_pb2.TokenDelta, now: float) -> None:
        if delta.offset != asked.num_tokens:
            raise RuntimeError(f"tokens from {delta.offset} after {asked.num_tokens}")
        if asked.num_tokens:
            self.seen.gaps_s.append(now - asked.last_at)
        else:
            self.seen.ttfts_s.append(now - asked.sent_at)
        asked.last_at = now
        count = len(delta.token_ids)
        asked.num_tokens += count
        self.seen.num_tokens += count

    def end(self, asked: Asked) -> None:
        if asked.num_tokens != self._num_tokens:
            raise RuntimeError(f"{asked.num_tokens} tokens of {self._num_tokens}")
        self.seen.num_requests += 1


class SessionClient(_Tally):
    """Everything over one Session.

    Args:
        address: host:port.
        num_slots: requests at once, at most.
        num_prompt_tokens: of each request.
        num_tokens: of each answer.
        dial: TLS, or not.
        traced: whether its requests are.
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
        self._asked: dict[int, Asked] = {}
        self._to_send: deque[int] = deque()
        self._posted = asyncio.Event()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    async def ask(self, slot: int) -> None:
        asked = Asked(time.perf_counter(), asyncio.get_running_loop().create_future())
        self._asked[slot] = asked
        self._to_send.append(slot)
        self._posted.set()
        await asked.done

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()

    async def _write(self) -> None:
        """As the client library does it: what waits goes as one message."""
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
            for asked in self._asked.values():
                asked.done.set_exception(error)

    def _event(self, event: inference_pb2.SessionEvent, now: float) -> None:
        if event.HasField("delta"):
            self.token(self._asked[event.stream], event.delta, now)
        elif event.HasField("finished"):
            asked = self._asked.pop(event.stream)
            self.end(asked)
            asked.done.set_result(None)
        elif event.HasField("failed"):
            raise RuntimeError(event.failed.message)


class StreamsClient(_Tally):
    """One Generate per request, over some connections; arguments as SessionClient's."""

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

    async def ask(self, slot: int) -> None:
        asked = Asked(time.perf_counter(), asyncio.get_running_loop().create_future())
        call = self._calls[slot % len(self._calls)](self._requests[slot], wait_for_ready=True)
        while (event := await call.read()) is not grpc.aio.EOF:
            if event.HasField("delta"):
                self.token(asked, event.delta, time.perf_counter())
        self.end(asked)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()


class Client(Protocol):
    """Asks for a slot at a time, and keeps count of what it sees."""

    seen: Seen

    async def ask(self, slot: int) -> None:
        """One request, until it has ended."""
        ...

    async def close(self) -> None: ...


async def wave(client: Client, num_slots: int) -> None:
    """All slots at once, until all have ended."""
    await asyncio.gather(*map(client.ask, range(num_slots)))


class Loop(AsyncClosing):
    """Every slot's next request follows its last; their first ones are spread over some time."""

    def __init__(self, client: Client, num_slots: int, spread_s: float) -> None:
        self._client = client
        self._tasks = [
            asyncio.create_task(self._ask(slot, spread_s * slot / num_slots))
            for slot in range(num_slots)
        ]

    async def _ask(self, slot: int, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while True:
            await self._client.ask(slot)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def run(self, seconds: float) -> None:
        """Lets it run for so long; raises what a request raised."""
        done, _ = await asyncio.wait(
            self._tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        for task in done:
            task.result()
