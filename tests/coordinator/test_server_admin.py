"""The Admin service over gRPC and the metrics: workers, requests and handoffs."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from prometheus_client import generate_latest

from baton.client import AdminClient, errors
from baton.coordinator.server.metrics import registry
from baton.runtime.config import BatonConfig
from baton.v1 import admin_pb2, cluster_pb2, common_pb2, kv_transfer_pb2
from tests.coordinator.inference_client import generate
from tests.coordinator.scripted_worker import WAIT_S, answer

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


async def test_admin_shows_pools_workers_and_requests(pair, inference, admin):
    async with pair(auto=False) as (p, d):
        await d.load(num_steps=3, num_running=1)
        call = inference.Generate(generate(request_id="mine", tenant="acme"), timeout=WAIT_S)
        await call.read()
        spec = (await p.command("prefill")).spec
        listed = await admin.ListRequests(admin_pb2.ListRequestsRequest())
        assert [(one.request_id, one.tenant) for one in listed.requests] == [("mine", "acme")]
        assert listed.requests[0].state == admin_pb2.REQUEST_STATE_PREFILLING
        pools = await admin.ListPools(admin_pb2.ListPoolsRequest())
        assert [pool.num_serving for pool in pools.pools] == [1, 1]
        assert pools.model.vocab_size == 512
        assert pools.lanes[0].num_running == 1
        workers = await admin.ListWorkers(admin_pb2.ListWorkersRequest(role=DECODE))
        assert [(one.worker_id, one.num_requests) for one in workers.workers] == [("d", 1)]
        await p.step(answer(spec, 0, 1, STOP))
        assert list((await call.read()).delta.token_ids) == [0]
        assert (await call.read()).finished.reason == STOP
        info = await admin.GetRequest(admin_pb2.GetRequestRequest(request_id="mine"))
        assert info.state == admin_pb2.REQUEST_STATE_FINISHED
        assert info.tenant == "acme"
        assert info.budget.total_us > 0
        assert (info.prefill_worker_id, info.decode_worker_id) == ("p", "d")


async def test_admin_cancels_and_refuses(pair, inference, admin):
    async with pair(auto=False):
        call = inference.Generate(generate(request_id="mine"), timeout=WAIT_S)
        await call.read()
        await admin.CancelRequest(admin_pb2.CancelRequestRequest(request_id="mine"))
        assert (await call.read()).finished.reason == common_pb2.FINISH_REASON_CANCELLED
        for method, request in (
            (admin.CancelRequest, admin_pb2.CancelRequestRequest(request_id="mine")),
            (admin.GetRequest, admin_pb2.GetRequestRequest(request_id="other")),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                await method(request)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as caught:
            await admin.ScalePool(admin_pb2.ScalePoolRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_tenant_that_cannot_exist_has_no_blocks_to_delete(coordinator):
    """An answer without an error would say that the tenant's blocks are deleted."""
    async with AdminClient(coordinator.address) as client:
        for fields in ({"tenant": "acme corp"}, {"tenant": "acme corp", "session_id": "s"}):
            with pytest.raises(errors.InvalidArgumentError) as caught:
                await client.drop_cache(**fields)
            assert caught.value.field == "tenant"


async def test_handoff_reports_are_counted(coordinator, pair, inference):
    async with pair(auto=False) as (p, _):
        call = inference.Generate(generate(), timeout=WAIT_S)
        await call.read()
        command = await p.command("prefill")
        report = cluster_pb2.HandoffReport(
            request_id=command.spec.request_id,
            attempt=1,
            handoff_id=command.handoff.handoff_id,
            state=3,
            num_bytes=512,
            exposed_us=100,
            transport="nccl",
            num_fallbacks=1,
        )
        await p.say(handoff=report)
        await p.step(answer(command.spec, 0, 1, STOP))
        await call.read()
        assert (await call.read()).HasField("finished")
    shown = generate_latest(registry(coordinator.shell.core, BatonConfig())).decode()
    for line in (
        'baton_handoffs_total{transport="nccl"} 1.0',
        'baton_handoff_bytes_total{transport="nccl"} 512.0',
        "baton_handoff_fallbacks_total 1.0",
        'baton_handoff_exposed_seconds_bucket{le="0.0001"} 1.0',
        "baton_handoff_exposed_seconds_sum 0.0001",
    ):
        assert line in shown


async def test_measured_speeds_are_shown(coordinator, pair, inference, admin):
    async with pair(auto=False) as (p, _):
        await p.load(
            kv_tokens_total=64,
            host_loads=cluster_pb2.TierLoads(num_bytes=4 * 10**9, duration_us=2 * 10**6),
            disk_loads=cluster_pb2.TierLoads(num_bytes=10**9, duration_us=4 * 10**6),
        )
        call = inference.Generate(generate(), timeout=WAIT_S)
        await call.read()
        command = await p.command("prefill")
        report = cluster_pb2.HandoffReport(
            request_id=command.spec.request_id,
            attempt=1,
            handoff_id=command.handoff.handoff_id,
            state=3,
            num_bytes=10**8,
            exposed_us=5000,
        )
        await p.say(handoff=report)
        await p.step(answer(command.spec, 0, 1, STOP))
        await call.read()
        assert (await call.read()).HasField("finished")
        workers = await workers_of(admin, common_pb2.ROLE_UNSPECIFIED)
        metrics = registry(coordinator.shell.core, BatonConfig())
        speeds = {
            (worker.worker_id, one.source, one.from_worker_id): one.bytes_per_s
            for worker in workers
            for one in worker.kv_speeds
        }
        assert speeds == {
            ("p", "host", ""): 2 * 10**9,
            ("p", "disk", ""): 25 * 10**7,
            ("d", "worker", "p"): 2 * 10**10,
        }
        for (worker, source, sender), speed in speeds.items():
            labels = {"worker": worker, "source": source, "from": sender}
            shown = metrics.get_sample_value("baton_kv_speed_bytes_per_second", labels)
            assert shown == pytest.approx(speed)


async def test_a_worker_s_peers_are_named(pair, admin):
    async with pair(auto=False) as (p, d):
        peers = [
            kv_transfer_pb2.PeerTransport(target=d.hello.kv_address, transport="shm"),
            kv_transfer_pb2.PeerTransport(
                target="gone.test:1", transport="grpc", reason="shm: no shared memory"
            ),
        ]
        await p.load(kv_tokens_total=64, peers=peers)
        async with asyncio.timeout(WAIT_S):
            while not (found := await workers_of(admin, PREFILL))[0].load.kv_tokens_total:
                await asyncio.sleep(0.01)
    (worker,) = found
    assert [(one.worker_id, one.target, one.transport, one.reason) for one in worker.peers] == [
        ("d", d.hello.kv_address, "shm", ""),
        ("", "gone.test:1", "grpc", "shm: no shared memory"),
    ]
    assert not worker.load.peers


async def workers_of(admin, role):
    return (await admin.ListWorkers(admin_pb2.ListWorkersRequest(role=role))).workers
