"""Test client of the inference service: builds messages and collects events by stream."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from baton.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.coordinator.scripted_worker import WAIT_S


@pytest.fixture
def inference(channel):
    return inference_pb2_grpc.InferenceStub(channel)


def generate(text="the quick fox", **fields) -> inference_pb2.GenerateRequest:
    sampling = {"max_tokens": 4, **fields.pop("sampling", {})}
    return inference_pb2.GenerateRequest(
        text=text, sampling=common_pb2.SamplingParams(**sampling), **fields
    )


class Client:
    """A session whose events are sorted by stream."""

    def __init__(self, inference) -> None:
        self.call = inference.Session()
        self.batches: list = []
        self._seen: dict[int, list] = {}

    async def submit(self, stream: int, request: inference_pb2.GenerateRequest) -> None:
        submit = inference_pb2.Submit(stream=stream, request=request)
        await self.call.write(inference_pb2.SessionRequest(submit=submit))

    async def cancel(self, stream: int) -> None:
        cancel = inference_pb2.Cancel(stream=stream)
        await self.call.write(inference_pb2.SessionRequest(cancel=cancel))

    async def until(self, stream: int, kind: str) -> list:
        """Reads until the stream has an event of this kind; returns all events of the stream."""
        async with asyncio.timeout(WAIT_S):
            while not any(one.WhichOneof("event") == kind for one in self.of(stream)):
                batch = await self.call.read()
                assert batch is not grpc.aio.EOF
                self.batches.append(batch)
                for event in batch.events:
                    self._seen.setdefault(event.stream, []).append(event)
        return self.of(stream)

    def of(self, stream: int) -> list:
        return self._seen.get(stream, [])
