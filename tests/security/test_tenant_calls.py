"""One tenant cannot hold all of a server's calls, not even with idle sessions."""

import asyncio
import contextlib
from contextlib import AsyncExitStack

import grpc
import pytest

from baton.client import BatonClient
from baton.client.errors import ResourceExhaustedError
from baton.coordinator.server import inference
from baton.runtime.network import rpc
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.security.accepted_requests import WAIT_S, accepted, outcome


@pytest.fixture
async def limited(start_coordinator, keys):
    """A coordinator that allows a tenant two calls, and the keys of tenants a and b."""
    made = {tenant: keys.add(tenant, tenant=tenant) for tenant in ("a", "b")}
    security = {"api_keys_file": keys.path, "max_calls_per_tenant": 2}
    async with start_coordinator(security) as running:
        yield running, made


async def test_idle_sessions_of_one_tenant_leave_calls_for_others(limited, count_refusals):
    running, keys = limited
    async with AsyncExitStack() as stack:
        held = []
        for _ in range(2):
            client = BatonClient(running.address, api_key=keys["a"])
            held.append(await stack.enter_async_context(client))
            await accepted(client)
        # The two sessions are idle but still open.
        async with BatonClient(running.address, api_key=keys["a"]) as third:
            refused = await outcome(third)
            assert isinstance(refused, ResourceExhaustedError)
            assert (refused.reason, refused.retry_after_s) == ("TENANT_CALLS", 1.0)
            assert "of tenant a" in str(refused)
            assert "security.max_calls_per_tenant" in str(refused)
        assert (await count_refusals(running))["Inference", "tenant_calls"] == 1
        async with BatonClient(running.address, api_key=keys["b"]) as other:
            await accepted(other)
        # An open session accepts any number of requests.
        await asyncio.gather(*(accepted(held[0]) for _ in range(5)))
        await held[1].aclose()
        async with BatonClient(running.address, api_key=keys["a"], retry_timeout_s=WAIT_S) as again:
            await accepted(again)


async def test_in_a_session_of_many_tenants_only_one_is_refused(limited):
    running, keys = limited
    async with AsyncExitStack() as stack:
        for _ in range(2):
            client = BatonClient(running.address, api_key=keys["a"])
            await accepted(await stack.enter_async_context(client))
        # Like a gateway: each request has its own credential.
        async with BatonClient(running.address) as gateway:
            of = {tenant: {"authorization": f"Bearer {key}"} for tenant, key in keys.items()}
            await accepted(gateway, **of["b"])
            assert (await outcome(gateway, **of["a"])).reason == "TENANT_CALLS"
            await accepted(gateway, **of["b"])


async def test_a_session_of_many_tenants_counts_for_those_it_serves(limited):
    running, keys = limited
    of = {tenant: {"authorization": f"Bearer {key}"} for tenant, key in keys.items()}
    async with AsyncExitStack() as stack:
        for _ in range(2):
            gateway = await stack.enter_async_context(BatonClient(running.address))
            for tenant in ("a", "b", "a", "b"):
                await accepted(gateway, **of[tenant])
        # Both sessions are idle, and tenant b used them last.
        async with BatonClient(running.address, api_key=keys["b"]) as other:
            assert (await outcome(other)).reason == "TENANT_CALLS"
        own = [BatonClient(running.address, api_key=keys["a"]) for _ in range(2)]
        for client in own:
            await accepted(await stack.enter_async_context(client))
        assert (await outcome(gateway, **of["a"])).reason == "TENANT_CALLS"


async def test_single_requests_count_as_calls_until_they_end(limited):
    running, keys = limited
    request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1]))
    metadata = [("authorization", f"Bearer {keys['a']}")]
    async with rpc.channel(running.address) as channel, asyncio.timeout(WAIT_S):
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.Generate(request, metadata=metadata) for _ in range(2)]
        for call in calls:
            assert (await call.read()).HasField("accepted")
        assert await stub.Generate(request, metadata=metadata).code() is (
            grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        for call in calls:
            call.cancel()
        while True:
            again = stub.Generate(request, metadata=metadata)
            with contextlib.suppress(grpc.RpcError):
                assert (await again.read()).HasField("accepted")
                break
        again.cancel()


async def test_a_resuming_call_shares_the_slot_of_the_broken_one(limited):
    running, keys = limited
    metadata = [("authorization", f"Bearer {keys['a']}")]
    async with rpc.channel(running.address) as channel, asyncio.timeout(WAIT_S):
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = []

        async def is_let_in(name, known=()):
            request = inference_pb2.GenerateRequest(request_id=name)
            request.tokens.ids.append(1)
            request.resume.token_ids.extend(known)
            calls.append(stub.Session(metadata=metadata))
            submit = inference_pb2.Submit(stream=1, request=request)
            await calls[-1].write(inference_pb2.SessionRequest(submit=submit))
            return (await calls[-1].read()).events[0].HasField("accepted")

        # The client has stopped reading, and the coordinator has not noticed.
        for name in ("r", "s"):
            assert await is_let_in(name)
        assert not await is_let_in("other", [7])
        for name in ("r", "s"):
            assert await is_let_in(name, [7])
        # A third call for the same request needs its own slot.
        assert not await is_let_in("r", [7, 8])
        assert not await is_let_in("new")
        assert not calls[0].done()
        calls[0].cancel()
        while not await is_let_in("r", [7, 8]):
            pass
        assert not await is_let_in("new")
        for call in calls:
            call.cancel()


async def test_a_session_beyond_the_limit_does_not_stay_open(limited, monkeypatch):
    running, keys = limited
    metadata = [("authorization", f"Bearer {keys['a']}")]
    request = inference_pb2.GenerateRequest(tokens=inference_pb2.TokenIds(ids=[1]))
    submit = inference_pb2.Submit(stream=1, request=request)
    async with rpc.channel(running.address) as channel, asyncio.timeout(WAIT_S):
        stub = inference_pb2_grpc.InferenceStub(channel)
        held = [stub.Session(metadata=metadata) for _ in range(2)]
        for call in held:
            await call.write(inference_pb2.SessionRequest(submit=submit))
            await call.read()
        monkeypatch.setattr(inference, "_CHARGE_TIMEOUT_S", 0.1)
        beyond = stub.Session(metadata=metadata)
        await beyond.write(inference_pb2.SessionRequest(submit=submit))
        assert (await beyond.read()).events[0].HasField("failed")
        assert await beyond.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "of tenant a" in await beyond.details()
        assert not any(call.done() for call in held)
        for call in held:
            call.cancel()
