"""Hostile traffic (garbage, half-open connections, wrong lengths, floods) does not stop service."""

import asyncio
import contextlib
import socket

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from baton.client import BatonClient
from baton.client.errors import UnavailableError
from baton.runtime.network import rpc
from baton.runtime.security import guard
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.security_config import SecurityConfig
from baton.runtime.telemetry.metrics import MetricsServer
from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.security.hostile import (
    GARBAGE,
    PREFACE,
    call_with_length,
    dropped,
    idle_connections,
    stream_ended,
)
from tests.security.http_gateway import gateway, metrics

# Longest wait for an event that must happen; long enough for a busy machine.
WAIT_S = 120.0
NUM_IDLE = 1000
GENERATE = "/baton.v1.Inference/Generate"
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture(params=["plain", "tls"])
def secured(request, pki):
    """A `security` section with a short handshake timeout, and a client's TLS for it."""
    quick = {"handshake_timeout_s": 1.0}
    return (quick, None) if request.param == "plain" else (pki.server(**quick), pki.tls())


async def is_served(address, tls):
    """Whether an honest client is served; a slow handshake may hit its timeout, so it retries."""
    async with asyncio.timeout(WAIT_S), BatonClient(address, tls=tls) as client:
        while True:
            with contextlib.suppress(UnavailableError):
                return (await client.model(WAIT_S)).name == "demo"


# ---- The coordinator's gRPC port; the workers' ports use the same server.


async def test_garbage_and_half_open_connections_are_dropped(start_coordinator, secured):
    security, tls = secured
    async with start_coordinator(security) as running:
        said = {**GARBAGE, "nothing": b"", "half a preface": PREFACE[:10]}
        found = await asyncio.gather(
            *(dropped(running.address, garbage, WAIT_S) for garbage in said.values()),
            is_served(running.address, tls),
        )
        assert dict(zip([*said, "served"], found, strict=True)) == dict.fromkeys(
            [*said, "served"], True
        )


@pytest.mark.parametrize("num_bytes", [2**31 - 1, 2**32 - 1, 64 * 2**20])
async def test_a_message_with_a_huge_length_is_refused_unread(start_coordinator, num_bytes):
    async with start_coordinator() as running:
        before = psutil.Process().memory_info().rss
        assert await stream_ended(running.address, call_with_length(GENERATE, num_bytes), WAIT_S)
        assert psutil.Process().memory_info().rss - before < 50 * 2**20
        assert await is_served(running.address, None)


async def test_a_message_beyond_the_limit_is_resource_exhausted(start_coordinator):
    async with start_coordinator() as running:
        async with rpc.channel(running.address, max_message_bytes=2**30) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(text="x" * (20 * 2**20))
            call = stub.Generate(request, timeout=WAIT_S)
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await is_served(running.address, None)


async def test_metadata_has_a_limit(start_coordinator):
    async with start_coordinator({"max_metadata_bytes": 4096}) as running:
        async with rpc.channel(running.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GetModelRequest()
            await stub.GetModel(request, metadata=[("x", "y" * 2000)])
            with pytest.raises(grpc.RpcError):
                await stub.GetModel(request, metadata=[("x", "y" * 8000)], timeout=WAIT_S)
        assert await is_served(running.address, None)


async def test_concurrent_calls_have_a_limit(start_coordinator):
    async with (
        start_coordinator({"max_calls": 2}) as running,
        rpc.channel(running.address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        sessions = [stub.Session() for _ in range(2)]
        submit = inference_pb2.Submit(stream=1, request=inference_pb2.GenerateRequest(text="a"))
        async with asyncio.timeout(WAIT_S):
            for session in sessions:
                await session.write(inference_pb2.SessionRequest(submit=submit))
                # After an answer, the coordinator counts the call.
                assert isinstance(await session.read(), inference_pb2.SessionEvents)
        async with rpc.channel(running.address) as other:
            async with asyncio.timeout(WAIT_S):
                call = inference_pb2_grpc.InferenceStub(other).Session()
                assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            for session in sessions:
                session.cancel()
            # The cancelled calls no longer count.
            async with asyncio.timeout(WAIT_S):
                while True:
                    with contextlib.suppress(grpc.RpcError):
                        await inference_pb2_grpc.InferenceStub(other).GetModel(
                            inference_pb2.GetModelRequest()
                        )
                        break


def _watch_health(channel):
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())


def _reflect(channel):
    return reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()


def _say_nothing(method):
    """A call that never sends its request message."""

    def call(channel):
        return channel.stream_unary(method)()

    return call


@pytest.mark.parametrize(
    "call",
    [
        _watch_health,
        _reflect,
        _say_nothing("/grpc.health.v1.Health/Check"),
        _say_nothing("/baton.v1.Admin/ListPools"),
        _say_nothing(GENERATE),
    ],
    ids=["health", "reflection", "check", "admin", "generate"],
)
async def test_unauthenticated_calls_do_not_block_clients(
    start_coordinator, keys, monkeypatch, call
):
    monkeypatch.setattr(guard, "_MESSAGE_TIMEOUT_S", 0.2)
    key = keys.add("one", tenant="a")
    async with (
        start_coordinator({"max_calls": 8, "api_keys_file": keys.path}) as running,
        rpc.channel(running.address) as channel,
        BatonClient(running.address, api_key=key) as client,
    ):
        calls = [call(channel) for _ in range(16)]
        await asyncio.wait([asyncio.create_task(one.code()) for one in calls], timeout=1.0)
        assert (await client.model(WAIT_S)).name == "demo"
        for one in calls:
            one.cancel()


@pytest.mark.parametrize("method", ["Generate", "Session"])
async def test_calls_without_a_credential_hold_only_a_part_of_all_calls(
    start_coordinator, keys, method
):
    """They are not limited by a timeout alone: new ones end the oldest."""
    max_calls = 32
    key = keys.add("one", tenant="a")

    def open_call(channel):
        # Neither call ever sends a message.
        return channel.stream_stream(f"/baton.v1.Inference/{method}")()

    async with (
        start_coordinator({"max_calls": max_calls, "api_keys_file": keys.path}) as running,
        rpc.channel(running.address) as channel,
        BatonClient(running.address, api_key=key) as client,
        asyncio.timeout(WAIT_S),
    ):
        calls = [open_call(channel) for _ in range(max_calls)]
        ended = [asyncio.create_task(one.code()) for one in calls]
        num_ended, num_left = 0, max_calls // 4
        while num_ended < max_calls - num_left:
            await asyncio.wait(
                [one for one in ended if not one.done()], return_when="FIRST_COMPLETED"
            )
            num_ended = sum(one.done() for one in ended)
        assert {one.result() for one in ended if one.done()} == {EXHAUSTED}
        for _ in range(max_calls):
            assert (await client.model(WAIT_S)).name == "demo"
        assert sum(not one.done() for one in ended) == num_left
        for one in calls:
            one.cancel()


async def test_a_session_with_a_valid_request_is_not_ended_for_newer_calls(start_coordinator, keys):
    key = keys.add("one", tenant="a")
    request = inference_pb2.GenerateRequest(text="a", authorization=f"Bearer {key}")
    submit = inference_pb2.Submit(stream=1, request=request)
    async with (
        start_coordinator({"max_calls": 32, "api_keys_file": keys.path}) as running,
        rpc.channel(running.address) as channel,
        rpc.channel(running.address) as others,
        asyncio.timeout(WAIT_S),
    ):
        session = inference_pb2_grpc.InferenceStub(channel).Session()
        await session.write(inference_pb2.SessionRequest(submit=submit))
        assert (await session.read()).events[0].HasField("accepted")
        strangers = [inference_pb2_grpc.InferenceStub(others).Session() for _ in range(24)]
        # They may arrive in any order; those that stay end later, for lack of a credential.
        ended = [asyncio.create_task(one.code()) for one in strangers]
        first, _ = await asyncio.wait(ended, return_when="FIRST_COMPLETED")
        assert {one.result() for one in first} == {EXHAUSTED}
        cancel = inference_pb2.SessionRequest(cancel=inference_pb2.Cancel(stream=1))
        await session.write(cancel)
        assert (await session.read()).events[0].HasField("finished")
        for one in (session, *strangers):
            one.cancel()


async def test_health_can_be_watched_without_a_credential(start_coordinator, keys):
    keys.add("one", tenant="a")
    async with (
        start_coordinator({"max_calls": 8, "api_keys_file": keys.path}) as running,
        rpc.channel(running.address) as channel,
        asyncio.timeout(WAIT_S),
    ):
        num_served = 0
        while num_served < 3:
            # The previous watch may still count for a moment.
            with contextlib.suppress(grpc.RpcError):
                watch = _watch_health(channel)
                found = await watch.read()
                num_served += found.status == health_pb2.HealthCheckResponse.SERVING
                watch.cancel()


async def test_many_idle_connections_do_not_block_clients(start_coordinator, secured):
    security, tls = secured
    async with start_coordinator({**security, "handshake_timeout_s": 60.0}) as running:
        async with idle_connections(running.address, NUM_IDLE):
            assert await is_served(running.address, tls)
        assert await is_served(running.address, tls)


async def test_connections_beyond_the_limit_end_with_their_handshakes(start_coordinator, secured):
    security, tls = secured
    async with (
        start_coordinator({**security, "max_connections": 20}) as running,
        idle_connections(running.address, 50),
    ):
        assert await is_served(running.address, tls)


# ---- The HTTP gateway.


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_idle_slow_and_invalid_clients_do_not_block_http(start_coordinator, pki, tls):
    used = pki if tls else None
    async with (
        start_coordinator(pki.server() if tls else None) as running,
        # Half as many connections are allowed as are opened.
        gateway(running.address, used, max_connections=NUM_IDLE // 2) as address,
    ):
        slow = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nx: "
        async with idle_connections(address, NUM_IDLE, b"" if tls else slow):
            await asyncio.to_thread(metrics, address, used)
            for garbage in GARBAGE.values():
                assert await dropped(address, garbage, WAIT_S)
            shown = await asyncio.to_thread(metrics, address, used)
        if not tls:
            assert 'baton_http_refusals_total{reason="evicted"}' in shown
        assert "baton_http_connections" in await asyncio.to_thread(metrics, address, used)


async def test_incomplete_http_handshakes_time_out(start_coordinator, pki):
    async with (
        start_coordinator(pki.server()) as running,
        gateway(running.address, pki, {"handshake_timeout_s": 1.0}) as address,
    ):
        halves = (b"", GARBAGE["tls hello"][:5])
        assert all(await asyncio.gather(*(dropped(address, half, WAIT_S) for half in halves)))
        assert await asyncio.to_thread(metrics, address, pki)


# ---- The metrics endpoint.


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_idle_and_slow_clients_do_not_block_metrics(start_coordinator, pki, tls):
    async with start_coordinator(pki.server() if tls else None) as running:
        address = running.metrics_address
        async with idle_connections(address, 100, b"GET /metrics HT"):
            shown = await asyncio.to_thread(metrics, address, pki if tls else None)
            assert "baton_queue_depth" in shown


@pytest.mark.parametrize(("sent", "num_counted"), [(b"", 0), (b"GET / HTTP/1.1\r\n\r\n", 1)])
def test_a_probe_of_metrics_that_sends_no_byte_is_no_refused_access(pki, sent, num_counted):
    refusals = Refusals()
    security = SecurityConfig(**pki.server())
    server = MetricsServer("127.0.0.1:0", "metrics_listen", CollectorRegistry(), security, refusals)
    host, port = server.address.split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as probe:
            if sent:
                probe.sendall(sent)
            else:
                probe.shutdown(socket.SHUT_WR)
            # The server closes the connection after it has counted the refusal.
            with contextlib.suppress(ConnectionResetError):
                while probe.recv(4096):
                    pass
    finally:
        server.close()
    assert sum(refusals.totals().values()) == num_counted
