"""A client that knows only the address and uses server reflection, as grpcurl does."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from baton.v1 import common_pb2
from tests.coordinator.scripted_worker import attached


class Reflected:
    """Calls methods by name with JSON messages, without generated code."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._database = ProtoReflectionDescriptorDatabase(self._channel)
        self._pool = DescriptorPool(self._database)

    def services(self) -> set[str]:
        return set(self._database.get_services())

    def call(self, service: str, method: str, request: dict) -> list[dict]:
        found = self._pool.FindServiceByName(service).FindMethodByName(method)
        answers = (
            self._channel.unary_stream if found.server_streaming else self._channel.unary_unary
        )
        called = answers(
            f"/{service}/{method}",
            request_serializer=GetMessageClass(found.input_type).SerializeToString,
            response_deserializer=GetMessageClass(found.output_type).FromString,
        )(ParseDict(request, GetMessageClass(found.input_type)()), timeout=60.0)
        messages = called if found.server_streaming else [called]
        return [MessageToDict(message, descriptor_pool=self._pool) for message in messages]

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def reflected(coordinator):
    client = Reflected(coordinator.address)
    yield client
    client.close()


async def test_every_service_is_found(reflected):
    found = await asyncio.to_thread(reflected.services)
    assert {"baton.v1.Inference", "baton.v1.Admin", "grpc.health.v1.Health"} <= found


async def test_text_is_generated(coordinator, reflected, say_hello):
    hellos = [
        say_hello(name, role)
        for name, role in (("p", common_pb2.ROLE_PREFILL), ("d", common_pb2.ROLE_DECODE))
    ]
    async with attached(coordinator.address, *hellos):
        events = await asyncio.to_thread(
            reflected.call,
            "baton.v1.Inference",
            "Generate",
            {"text": "the quick fox", "sampling": {"maxTokens": 4}},
        )
    assert "accepted" in events[0]
    assert "finished" in events[-1]
    tokens = [token for event in events[1:-1] for token in event["delta"]["tokenIds"]]
    assert len(tokens) == 4
    assert events[-1]["finished"]["reason"] == "FINISH_REASON_LENGTH"


async def test_state_is_listed(reflected):
    (answer,) = await asyncio.to_thread(reflected.call, "baton.v1.Admin", "ListPools", {})
    assert {pool["role"] for pool in answer["pools"]} == {"ROLE_PREFILL", "ROLE_DECODE"}


async def test_an_error_is_a_status(reflected):
    def ask() -> None:
        reflected.call("baton.v1.Inference", "Generate", {"text": ""})

    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.to_thread(ask)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
