"""Scripted workers for the bare relay: the answers of cost_worker.py, encoded for the client.

`python -m baton.bench.relay_worker --help`. One process plays a prefill and a decode worker, like
cost_worker.py. The relay does not change messages, so the workers send session events.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from baton.bench import cost_answers
from baton.bench.bare_relay import DECODE, PREFILL, SERVICE
from baton.bench.cost_answers import Answers, Token
from baton.bench.cost_worker import Decoder, Gate, WriteQueue
from baton.runtime.network import rpc
from baton.runtime.process import lifecycle
from baton.v1 import inference_pb2


class Stream:
    """One of the two streams from the workers to the relay."""

    def __init__(self, channel: grpc.aio.Channel, name: str, kind: Any) -> None:
        self._call: Any = channel.stream_stream(
            f"/{SERVICE}/{name}", response_deserializer=kind.FromString
        )(wait_for_ready=True)

    async def opened(self) -> None:
        """Waits until the relay has accepted the stream and forwards messages."""
        # The relay sends its metadata when it forwards; gRPC's wait_for_connection may end before.
        await self._call.initial_metadata()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self._call.read()) is not grpc.aio.EOF:
            yield message
        raise ConnectionError("the relay closed the stream")

    async def write(self, events: bytes) -> None:
        await self._call.write(events)


async def prefill(stream: Stream, answers: Answers) -> None:
    """Serves a prefill worker: answers each request with its first token at once."""
    queue = WriteQueue(stream.write)
    async with asyncio.TaskGroup() as group:
        group.create_task(queue.run())
        async for message in stream:
            for entry in message.batch:
                for one in entry.batch or (entry,):
                    event = inference_pb2.SessionEvent(stream=one.submit.stream)
                    queue.post(answers.of(event, 0, 1))


async def decode(stream: Stream, decoder: Decoder, answers: Answers, num_tokens: int) -> None:
    """Serves a decode worker: continues each request after its first token."""
    async with asyncio.TaskGroup() as group:
        group.create_task(decoder.run())
        async for message in stream:
            for event in message.events:
                if event.HasField("delta"):
                    request = inference_pb2.SessionEvent(stream=event.stream)
                    decoder.add(event.stream, answers.of(request, 1, num_tokens))


async def run(arguments: argparse.Namespace, ready: Callable[[], None]) -> int:
    """Serves a relay until the process is killed."""
    num_tokens, address = arguments.tokens, arguments.relay
    answers = cost_answers.session_events(num_tokens)
    async with (
        rpc.channel(address) as prefilling_over,
        rpc.channel(address) as decoding_over,
        asyncio.TaskGroup() as group,
    ):
        prefilling = Stream(prefilling_over, PREFILL, inference_pb2.SessionRequest)
        await prefilling.opened()
        group.create_task(prefill(prefilling, answers))
        if num_tokens > 1:
            decoding = Stream(decoding_over, DECODE, inference_pb2.SessionEvents)
            await decoding.opened()

            async def send(step: list[tuple[int, bytes | Token]]) -> None:
                await decoding.write(b"".join([one for _, one in step if isinstance(one, bytes)]))

            gate = Gate(0 if arguments.step_ms else arguments.requests)
            decoder = Decoder(arguments.step_ms / 1e3, gate, send)
            group.create_task(decode(decoding, decoder, answers, num_tokens))
        ready()
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--relay", required=True, help="host:port")
    parser.add_argument("--requests", type=int, default=0, help="requests per wave, flat out")
    parser.add_argument("--tokens", type=int, required=True, help="output tokens per request")
    parser.add_argument("--step-ms", type=float, required=True, help="0: flat out, in waves")
    lifecycle.run(run(parser.parse_args(), lambda: print("ready", flush=True)))


if __name__ == "__main__":
    main()
