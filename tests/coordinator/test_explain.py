"""Latency budgets of requests: the stages sum to the client's times, and stalls have causes."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.coordinator.server import stall as stall_guard
from baton.coordinator.server.server import Coordinator
from baton.coordinator.server.shell import Shell
from baton.coordinator.state.slow_steps import Cause
from baton.coordinator.telemetry.stalls import MAX_STALLS
from baton.runtime.config import parse
from baton.runtime.network import rpc
from baton.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cluster_pb2,
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
)
from tests.coordinator.live_status import MODEL, LiveCell
from tests.coordinator.scripted_worker import WAIT_S, answer, attached
from tests.runtime.otlp_collector import OtlpCollector

BATCH, LENGTH = common_pb2.LANE_BATCH, common_pb2.FINISH_REASON_LENGTH
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
# Batch requests have no targets by default.
TARGETS = {"scaling": {"targets": {"batch": {"itl_ms": 50}}}}


def plain() -> LiveCell:
    return LiveCell().workers().load(4, 400, 30).after(20)


def far_away() -> LiveCell:
    return LiveCell().workers(delay_s=0.05).load(4, 400, 30).after(20)


def queued() -> LiveCell:
    return LiveCell().workers().load(12, 2000, 10, 5).after(20)


def unsplit() -> LiveCell:
    cell = LiveCell(decode={"local_prefill": True}, lanes={"interactive": {"itl_ms": 1000}})
    cell.workers(max_num_batched_tokens=2048)
    return cell.load(3, 100, 100, 5).load(14, 2000, 2, 5).after(20)


def recovered() -> LiveCell:
    cell = LiveCell().workers(num_decode=2, prefix_caching=False).load(4, 2000, 100, 6).after(5)
    cell.kill("d0")
    return cell.after(15)


def parked() -> LiveCell:
    """Batch requests that are parked when interactive requests arrive."""
    cell = LiveCell(lanes={"interactive": {"itl_ms": 14}}, **TARGETS).workers()
    for _ in range(30):
        cell.submit(100, 400, lane=BATCH)
    cell.after(3)
    return cell.load(8, 100, 100, 5).after(30)


def large_batches() -> LiveCell:
    slow = replace(MODEL, step_per_request_s=0.004)
    return LiveCell().workers(model=slow).load(8, 50, 60, 5).after(20)


def explained(cell: LiveCell) -> list[admin_pb2.RequestInfo]:
    ended = [
        number for number, one in enumerate(cell.outcomes) if one.ended_at and one.error is None
    ]
    assert len(ended) > 10
    return [cell.explain(f"r{number}") for number in ended]


def test_the_computation_of_a_prompt_is_predicted_on_a_worker_of_either_role():
    placements = [one.placement for one in explained(unsplit())]
    local = [one for one in placements if one.prompt_worker_id == one.decode_worker_id]
    assert 0 < len(local) < len(placements)
    assert all(one.computation.ToNanoseconds() > 0 for one in placements)


def test_stages_before_a_loss_name_the_worker_that_was_lost():
    cell = LiveCell().workers(num_decode=2)
    cell.submit(3, 400)
    cell.after(1.0)
    before = cell.explain("r0")
    [lost] = {one.worker_id for one in before.budget.stages if one.stage == common_pb2.STAGE_DECODE}
    cell.kill(lost)
    [other] = {"d0", "d1"} - {lost}
    info = cell.after(10).explain("r0")
    found = [(one.stage, one.worker_id) for one in info.budget.stages if one.worker_id]
    assert found == [
        (common_pb2.STAGE_PREFILL, "p0"),
        (common_pb2.STAGE_HANDOFF, lost),
        (common_pb2.STAGE_DECODE, lost),
        (common_pb2.STAGE_DECODE, other),
    ]


@pytest.mark.parametrize(
    "cell", [plain, far_away, queued, unsplit, recovered, parked], ids=lambda cell: cell.__name__
)
def test_stages_add_up_to_what_the_client_saw(cell):
    made = cell()
    for info in explained(made):
        outcome = made.outcomes[int(info.request_id[1:])]
        sum_us = sum(stage.duration_us for stage in info.budget.stages)
        e2e_us = (outcome.ended_at - outcome.arrived_at) * 1e6
        assert abs(sum_us - e2e_us) <= 0.02 * e2e_us
        assert sum_us == info.budget.total_us
        ends = [one.start_us + one.duration_us for one in info.budget.stages]
        assert [one.start_us for one in info.budget.stages] == [0, *ends[:-1]]
        assert abs(info.budget.ttft_us - outcome.ttft_s * 1e6) <= 1


@pytest.mark.parametrize(
    ("cell", "cause"),
    [
        (unsplit, Cause.PREFILL),
        (recovered, Cause.RECOVERY),
        (parked, Cause.PARKED),
        (far_away, Cause.HANDOFF),
        (large_batches, Cause.BATCH),
    ],
    ids=lambda one: one.__name__ if callable(one) else one.name.lower(),
)
def test_stalls_have_their_causes(cell, cause):
    made = cell()
    found = explained(made)
    causes = [one.cause for info in found for one in info.stalls]
    assert cause.value in causes
    if cause is not Cause.BATCH:
        assert Cause.BATCH.value not in causes
    for info in found:
        assert len(info.stalls) <= MAX_STALLS
        times = made.outcomes[int(info.request_id[1:])].token_times
        arrived_at = made.outcomes[int(info.request_id[1:])].arrived_at
        gaps_us = [
            (round((before - arrived_at) * 1e6), round((after - before) * 1e6))
            for before, after in itertools.pairwise(times)
        ]
        over = sorted((gap for gap in gaps_us if gap[1] > 50_000), key=lambda gap: -gap[1])
        told = [(one.start_us, one.duration_us) for one in info.stalls]
        assert len(told) == min(len(over), MAX_STALLS)
        # Sums of gaps in whole microseconds are off by one per gap at most.
        for at_us, gap_us in told:
            assert any(abs(at_us - at) <= 200 and abs(gap_us - gap) <= 1 for at, gap in over)


def test_a_stall_names_the_request_whose_prompt_caused_it():
    cell = unsplit()
    stalls = [one for info in explained(cell) for one in info.stalls]
    told = [one for one in stalls if one.cause == Cause.PREFILL.value and one.by_request_id]
    assert told
    for one in told:
        assert cell.outcomes[int(one.by_request_id[1:])].num_prompt_tokens == one.by_tokens == 2000


def test_a_stall_caused_by_a_request_joining_the_step():
    """Loading the KV cache of a handoff makes the engine's step longer."""
    cell = LiveCell().workers(num_prefill=1).load(2, 100, 400, 1).after(2)
    first = cell.outcomes[0]
    assert first.token_times
    worker = cell.core.workers.by_id("d0")
    assert worker is not None
    cell.submit(1000, 20)
    # The request's first output on this worker comes from a slow step.
    shape = cell._workers["d0", 1].shape
    cell._workers["d0", 1].shape = replace(shape, model=replace(MODEL, step_base_s=0.2))
    cell.after(0.6)
    joined = [one for one in worker.slow_steps if one.cause is Cause.JOINED]
    assert [one.by for one in joined] == [f"r{len(cell.outcomes) - 1}"]
    assert joined[0].num_tokens == 1000


def test_a_running_request_is_explained_so_far():
    cell = LiveCell().workers()
    cell.submit(400, 1000)
    cell.after(2)
    info = cell.explain("r0")
    assert info.state == admin_pb2.REQUEST_STATE_DECODING
    assert info.budget.total_us == sum(one.duration_us for one in info.budget.stages) == 2_000_000


async def test_a_client_that_does_not_read_is_told_of(monkeypatch):
    monkeypatch.setattr(stall_guard, "SLOW_S", 0.0)
    slow = []
    taken = asyncio.Event()

    async def write(message):
        await taken.wait()

    guard = stall_guard.StallGuard(
        SimpleNamespace(write=write), lambda: None, on_slow=lambda *times: slow.append(times)
    )
    writing = asyncio.create_task(guard.write(b"tokens"))
    await asyncio.sleep(0)
    taken.set()
    await writing
    guard.close()
    ((began_at, ended_at),) = slow
    assert began_at <= ended_at
    shell = Shell(LiveCell().core)
    session, other = shell.open_session(), shell.open_session()
    shell.wrote_slowly(session, 10.0, 12.5)
    (stall,) = shell.client_stalls(session.number, 9.0, 11.0)
    assert (stall.start_us, stall.duration_us, stall.cause) == (1_000_000, 2_500_000, Cause.CLIENT)
    assert shell.client_stalls(other.number, 9.0, 11.0) == []
    assert shell.client_stalls(session.number, 13.0, 14.0) == []


async def test_the_trace_says_the_same(model_dir, say_hello):
    async with OtlpCollector() as collector:
        config = parse(
            {
                "model": str(model_dir),
                "coordinator": {"listen": "127.0.0.1:0", "heartbeat_s": 0.2},
                "decode": {"local_prefill": False},
                "tracing": {"otlp_endpoint": collector.endpoint},
            },
            "test",
        )
        hellos = say_hello("p", common_pb2.ROLE_PREFILL), say_hello("d", common_pb2.ROLE_DECODE)
        async with (
            Coordinator(config) as coordinator,
            attached(coordinator.address, *hellos, auto=False) as (p, d),
            rpc.channel(coordinator.address) as channel,
        ):
            inference = inference_pb2_grpc.InferenceStub(channel)
            for asked in (asking("untraced"), asking("r", traceparent=f"00-{TRACE}-{PARENT}-01")):
                reading = asyncio.create_task(_read(inference.Generate(asked)))
                first = answer((await p.command("prefill")).spec, 0, 1, 0)
                first.timings.CopyFrom(cluster_pb2.StageTimings(queue_us=1000, run_us=2000))
                await p.step(first)
                last = answer((await d.command("decode")).spec, 1, 3, LENGTH)
                last.timings.CopyFrom(cluster_pb2.StageTimings(queue_us=500, run_us=700))
                await d.step(last)
                async with asyncio.timeout(WAIT_S):
                    await reading
            admin = admin_pb2_grpc.AdminStub(channel)
            info = await admin.GetRequest(admin_pb2.GetRequestRequest(request_id="r"))
        spans = await collector.wait_for("request", "request decode")
    assert {one.trace_id for one in collector.spans} == {TRACE}
    whole = spans["request"]
    assert whole.parent_id == PARENT
    assert whole.attributes["baton.request.id"] == "r"
    assert whole.end_ns - whole.start_ns == info.budget.total_us * 1000
    stages = sorted(
        (one for one in collector.spans if one.parent_id == whole.span_id),
        key=lambda one: one.start_ns,
    )
    assert [
        (one.name, (one.start_ns - whole.start_ns) // 1000, (one.end_ns - one.start_ns) // 1000)
        for one in stages
    ] == [
        (
            f"request {common_pb2.Stage.Name(one.stage).removeprefix('STAGE_').lower()}",
            one.start_us,
            one.duration_us,
        )
        for one in info.budget.stages
    ]
    assert [one.attributes.get("baton.worker.id", "") for one in stages] == [
        one.worker_id for one in info.budget.stages
    ]


def asking(name: str, **fields: str) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=4)
    return inference_pb2.GenerateRequest(request_id=name, text="fox", sampling=sampling, **fields)


async def _read(call) -> None:
    async for _ in call:
        pass
