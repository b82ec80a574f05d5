"""Provokes every finding of the doctor in simulated cells; a healthy cell has no finding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.client import doctor
from baton.client.doctor import Kind
from baton.coordinator.server import admin
from baton.coordinator.state import events as ev
from baton.coordinator.state.scaling_config import Targets
from baton.runtime.durations import to_seconds
from baton.v1 import admin_pb2, cluster_pb2, common_pb2, kv_transfer_pb2
from tests.coordinator.live_status import MODEL, PREFILL, LiveCell
from tests.coordinator.virtual_cell import WorkerShape

BATCH = common_pb2.LANE_BATCH


def found(cell: LiveCell) -> list[doctor.Finding]:
    findings = doctor.diagnose(cell.status())
    for finding in findings:
        assert finding.what
        assert finding.stage
        assert finding.first
        assert any(char.isdigit() for one in finding.evidence for char in one)
    return findings


def healthy() -> LiveCell:
    return LiveCell().workers().load(4, 400, 30).after(20)


def far_away() -> LiveCell:
    """Messages to workers take 350 ms; the prompts are tiny."""
    return LiveCell().workers(delay_s=0.35).load(4, 16, 8).after(18)


def more_than_one_worker_computes() -> LiveCell:
    """A prompt takes 120 ms and 12 prompts arrive per second."""
    return LiveCell().workers().load(12, 2000, 4).after(10)


def slow_prompts() -> LiveCell:
    slow = replace(MODEL, prefill_per_token_s=0.0004)
    return LiveCell().workers(model=slow).load(0.7, 2000, 20, 20).after(21)


def prompts_beside_outputs() -> LiveCell:
    """Decode workers compute prompts in large steps."""
    cell = LiveCell(decode={"local_prefill": True}, lanes={"interactive": {"itl_ms": 1000}})
    cell.workers(max_num_batched_tokens=2048)
    return cell.load(3, 100, 100).load(14, 2000, 2).after(11)


def long_gaps(longest_gap_ms: float | None, rate: float = 5) -> LiveCell:
    """Each prompt is computed in a step of 100 ms: twice the ITL target of 50 ms."""
    steps = {} if longest_gap_ms is None else {"longest_gap_ms": longest_gap_ms}
    cell = LiveCell(elastic=True, steps=steps)
    cell.workers(num_prefill=0, max_num_batched_tokens=2048)
    return cell.load(1, 100, 200).load(rate, 1800, 2).after(11)


def many_at_once() -> LiveCell:
    """A step costs 4 ms for each request in it."""
    return (
        LiveCell().workers(model=replace(MODEL, step_per_request_s=0.004)).load(8, 50, 60).after(9)
    )


def a_peak() -> LiveCell:
    """The load is three times the capacity, and admission refuses no request."""
    return LiveCell().workers().load(25, 2000, 2).after(10)


def a_peak_with_a_limit() -> LiveCell:
    lanes = {"interactive": {"ttft_ms": 600}}
    return LiveCell(lanes=lanes).workers().load(20, 2000, 2).after(10)


def a_full_queue() -> LiveCell:
    lanes = {"interactive": {"max_queued": 2}}
    return LiveCell(lanes=lanes).workers().load(20, 2000, 2).after(10)


def a_greedy_tenant() -> LiveCell:
    cell = LiveCell().workers()
    return cell.load(12, 2000, 2, tenant="big").load(2, 100, 2, tenant="small").after(10)


def a_favoured_tenant() -> LiveCell:
    cell = LiveCell(tenants={"big": {"weight": 1000}}).workers()
    return cell.load(30, 500, 2, 12, tenant="big").load(2, 100, 2, 12, tenant="small").after(13)


def late_workers() -> LiveCell:
    """Requests arrive eight seconds before the workers."""
    cell = LiveCell().load(1, 100, 4, 20).after(8)
    return cell.workers().after(14)


def starting_workers() -> LiveCell:
    """Requests wait for a starting prefill worker."""
    cell = LiveCell().workers(num_prefill=0).load(1, 100, 4, 20)
    starting = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_STARTING)
    cell.add_worker("p0", PREFILL, WorkerShape(MODEL))
    cell.post(ev.WorkerChanged(("p0", 1), starting))
    return cell.after(8)


def no_worker() -> LiveCell:
    return LiveCell().workers(num_decode=0).load(1, 100, 4, 20).after(8)


def a_death() -> LiveCell:
    cell = LiveCell().workers(num_decode=2).load(4, 100, 60).after(10)
    cell.kill("d0")
    return cell.after(10)


def slow_handoffs() -> LiveCell:
    """Handoffs take 200 ms; outputs are short, so that many gaps contain a handoff."""
    return LiveCell().workers(handoff_s=0.2).load(4, 400, 8).after(20)


def handoffs_that_fall_back() -> LiveCell:
    cell = healthy()
    for number in range(10):
        report = cluster_pb2.HandoffReport(
            handoff_id=bytes([number]),
            state=kv_transfer_pb2.HANDOFF_STATE_COMMITTED,
            transport="grpc",
            exposed_us=5000,
            num_fallbacks=number % 2,
        )
        cell.post(ev.WorkerHandoff(("p0", 1), report))
    return cell


def full_caches() -> LiveCell:
    """Two requests with a final length of 2,500 tokens almost fill the KV cache."""
    cell = LiveCell().workers(kv_tokens=5100)
    for _ in range(2):
        cell.submit(1500, 1000)
    return cell.after(8)


def full_staging() -> LiveCell:
    cell = healthy()
    load = cluster_pb2.LoadReport(staging_bytes_used=95, staging_bytes_total=100)
    cell.post(ev.LoadReported(("d0", 1), load))
    return cell


PROVOKED = {
    far_away: Kind.NETWORK,
    more_than_one_worker_computes: Kind.QUEUE,
    slow_prompts: Kind.PREFILL,
    prompts_beside_outputs: Kind.DECODE_INTERFERENCE,
    many_at_once: Kind.BATCH_TOO_LARGE,
    a_peak: Kind.ADMISSION,
    a_peak_with_a_limit: Kind.ADMISSION,
    a_full_queue: Kind.ADMISSION,
    a_greedy_tenant: Kind.FAIRNESS,
    a_favoured_tenant: Kind.FAIRNESS,
    late_workers: Kind.COLD_STARTS,
    starting_workers: Kind.COLD_STARTS,
    no_worker: Kind.NO_WORKERS,
    a_death: Kind.RECOVERIES,
    slow_handoffs: Kind.SLOW_HANDOFFS,
    handoffs_that_fall_back: Kind.HANDOFF_FALLBACKS,
    full_caches: Kind.KV_FULL,
    full_staging: Kind.STAGING_FULL,
}


@pytest.mark.parametrize("cell", PROVOKED, ids=lambda cell: cell.__name__)
def test_each_problem_gives_exactly_its_finding(cell):
    assert {one.kind for one in found(cell())} == {PROVOKED[cell]}


def test_every_kind_is_provoked():
    assert set(PROVOKED.values()) == set(Kind)


def test_a_healthy_cell_is_healthy():
    cell = healthy()
    assert found(cell) == []
    assert doctor.summary(cell.status()).startswith("healthy; in the last 60 s interactive: ")


def test_first_tokens_from_before_their_lane_had_a_target_are_not_late():
    batch = common_pb2.LANE_BATCH
    cell = LiveCell().workers().load(4, 400, 30, lane=batch).after(20)
    cell.post(ev.TargetsRequested({"batch": Targets(ttft_s=5.0, itl_s=None, percentile=95.0)}))
    lane = next(one for one in cell.status().lanes if one.info.lane == batch)
    assert (lane.targets.ttft_ms, lane.ttft_ratio.num) == (5000, 0)
    assert lane.ttft.num > 8
    assert found(cell) == []


def test_evidence_about_a_new_target_does_not_count_earlier_first_tokens():
    batch = common_pb2.LANE_BATCH
    cell = LiveCell().workers().load(4, 400, 30, lane=batch).after(20)
    for _ in range(40):
        cell.submit(7000, 200, lane=batch)
    cell.post(ev.TargetsRequested({"batch": Targets(ttft_s=0.1, itl_s=None, percentile=95.0)}))
    cell.after(0.3)
    lane = next(one for one in cell.status().lanes if one.info.lane == batch)
    assert (lane.ttft_ratio.num, lane.ttft.num > 8) == (0, True)
    (evidence,) = (one.evidence[0] for one in found(cell) if "the target is" in one.evidence[0])
    assert "no request with this target has had its first token yet" in evidence


def parked(itl_ms: float | None = None, ttft_ms: float | None = None) -> LiveCell:
    """Batch requests that had their first tokens at once are parked for interactive requests."""
    targets = {"batch": {"itl_ms": itl_ms, "ttft_ms": ttft_ms}}
    cell = LiveCell(lanes={"interactive": {"itl_ms": 14}}, scaling={"targets": targets}).workers()
    for _ in range(40):
        cell.submit(100, 600, lane=BATCH)
    return cell.after(3).load(8, 100, 100, 40)


def lane_status(cell: LiveCell, lane: common_pb2.Lane.ValueType) -> admin_pb2.LaneStatus:
    return next(one for one in cell.status().lanes if one.info.lane == lane)


def test_parked_requests_do_not_wait_for_their_first_tokens():
    cell = parked(ttft_ms=2000).after(5)
    batch = lane_status(cell, BATCH)
    assert batch.info.num_queued > 8
    assert batch.info.oldest_wait.ToNanoseconds() > 2 * 2e9
    assert (batch.num_late, batch.first_token_waits.num) == (0, 0)
    assert found(cell) == []
    # Requests without a first token do count.
    for _ in range(10):
        cell.submit(100, 600, lane=BATCH)
    cell.after(5)
    (finding,) = found(cell)
    assert finding.what == "batch: first tokens are late: requests wait for a worker"
    assert any(one.startswith("10 requests wait") for one in finding.evidence)


def test_gaps_of_parked_requests_are_no_network_problem():
    (finding,) = found(parked(itl_ms=20).after(45))
    assert finding.kind is Kind.QUEUE
    assert "parked" in finding.what
    assert "decode worker" in finding.first


def test_slow_steps_of_a_lane_are_those_over_its_own_target():
    targets = {"interactive": {"itl_ms": 5}, "batch": {"itl_ms": 1000}}
    cell = LiveCell(scaling={"targets": targets}).workers().load(4, 100, 60)
    cell.load(4, 100, 60, lane=BATCH).after(10)
    interactive, batch = (
        lane_status(cell, lane).slow_steps for lane in (common_pb2.LANE_INTERACTIVE, BATCH)
    )
    assert interactive.num == interactive.num_over_gap == cell.status().decode.num_slow > 0
    assert (batch.num, batch.num_over_gap) == (0, 0)


def test_first_tokens_that_are_late_by_a_lost_worker_are_no_slow_prompts():
    """Ten prompts have been on the worker for two seconds when it is lost."""
    slow = replace(MODEL, prefill_base_s=10.0)
    cell = LiveCell().workers(num_prefill=0)
    cell.add_worker("p0", PREFILL, WorkerShape(slow))
    for _ in range(10):
        cell.submit(100, 30)
    cell.after(2)
    cell.add_worker("p1", PREFILL, WorkerShape(MODEL))
    cell.kill("p0")
    cell.after(3)
    assert lane_status(cell, common_pb2.LANE_INTERACTIVE).num_late == 10
    assert [one.kind for one in found(cell)] == [Kind.RECOVERIES]


def test_an_idle_cell_is_healthy():
    cell = LiveCell().workers()
    assert found(cell) == []
    assert "no request" in doctor.summary(cell.status())


def test_a_cell_without_workers_is_not_healthy():
    status = LiveCell().status()
    findings = doctor.diagnose(status)
    assert {one.kind for one in findings} == {Kind.NO_WORKERS}
    assert {one.what for one in findings} == {"no prefill worker serves", "no decode worker serves"}
    assert "baton worker --role prefill" in findings[0].first + findings[1].first
    for pool in status.pools:
        # The coordinator starts workers, but the pool is set to zero workers by an operator.
        pool.max_workers = 16
    findings = doctor.diagnose(status)
    assert {one.kind for one in findings} == {Kind.NO_WORKERS}
    assert {one.first for one in findings} == {
        "baton scale prefill 1: the pool's size is set to 0",
        "baton scale decode 1: the pool's size is set to 0",
    }
    for pool in status.pools:
        # An autoscaled pool may be empty until the next request.
        pool.sizes_itself = True
    assert doctor.diagnose(status) == []
    for pool in status.pools:
        pool.desired, pool.problem = 1, "worker decode-0 exited with code 1: no GPU"
    findings = doctor.diagnose(status)
    assert "no GPU" in " ".join(findings[0].evidence)
    assert "baton why" in findings[0].first


def first(status, kind: Kind) -> str:
    """Returns the advice of the only finding of a kind."""
    [finding] = [one for one in doctor.diagnose(status) if one.kind is kind]
    return finding.first


def elastic(status):
    """Returns the status of a cell as an elastic cell with the same workers reports it."""
    status.elastic = True
    return status


def test_an_elastic_cell_needs_no_worker_of_each_role():
    cell = LiveCell(elastic=True).workers(num_prefill=0, num_decode=4).load(4, 400, 30).after(20)
    assert cell.status().elastic
    assert found(cell) == []


def test_an_elastic_cell_with_workers_of_one_role_shows_its_real_problem():
    status = elastic(more_than_one_worker_computes().status())
    for pool in status.pools:
        pool.num_serving = 2 if pool.role == PREFILL else 0
    assert [one.kind for one in doctor.diagnose(status)] == [Kind.QUEUE]


def test_an_elastic_cell_without_workers_gives_one_finding():
    status = elastic(LiveCell().status())
    [finding] = doctor.diagnose(status)
    assert (finding.kind, finding.what) == (Kind.NO_WORKERS, "no worker serves")
    for pool in status.pools:
        pool.max_workers, pool.sizes_itself = 16, True
    assert doctor.diagnose(status) == []
    # Both pools size themselves, and only one of them should have workers.
    status.pools[1].desired = 1
    [finding] = doctor.diagnose(status)
    assert "baton why decode" in finding.first


def test_the_kv_caches_of_an_elastic_cell_are_judged_together():
    status = elastic(full_caches().status())
    assert doctor.diagnose(status) == []
    for pool in status.pools:
        pool.kv_tokens_used = pool.kv_tokens_total
    [finding] = doctor.diagnose(status)
    assert finding.kind is Kind.KV_FULL
    assert "100.0 % of 10200 tokens" in finding.evidence[0]


def test_a_fallback_of_a_handoff_that_was_cancelled_is_told():
    """No handoff has ended: the request of the only one was cancelled."""
    cell = LiveCell().workers()
    report = cluster_pb2.HandoffReport(
        handoff_id=b"h",
        state=kv_transfer_pb2.HANDOFF_STATE_FAILED,
        reason=kv_transfer_pb2.REFUSAL_REASON_CANCELLED,
        num_fallbacks=1,
    )
    cell.post(ev.WorkerHandoff(("p0", 1), report))
    [finding] = found(cell)
    assert finding.kind is Kind.HANDOFF_FALLBACKS
    assert finding.evidence[0].startswith("of 0 ended handoffs 0 failed")


def test_a_drain_that_moves_requests_at_its_time_limit_is_no_finding():
    cell = LiveCell().workers(num_decode=2).load(4, 100, 200, 12).after(8)
    cell.post(ev.DrainRequested("d0", 0.1, "test"))
    cell.after(0.1).stop("d0")
    cell.after(20)
    assert cell.core.stats.num_moved
    assert all(len(one.token_times) == 200 for one in cell.outcomes)
    assert found(cell) == []


def test_a_past_problem_gives_no_finding():
    cell = more_than_one_worker_computes()
    assert found(cell)
    assert found(cell.after(90)) == []


def test_a_finding_names_the_waiting_lane():
    greedy, favoured = found(a_greedy_tenant())[0], found(a_favoured_tenant())[0]
    assert "the big tenant big waits" in greedy.what
    assert "the small tenant small waits" in favoured.what
    assert "tenants.big.weight" in favoured.first


def test_what_to_change_names_the_pool_that_is_behind():
    behind = more_than_one_worker_computes().status(), full_caches().status()
    assert "baton worker --role prefill" in doctor.diagnose(behind[0])[0].first
    assert "baton worker --role decode" in doctor.diagnose(behind[1])[0].first
    for status in behind:
        for pool in status.pools:
            # The coordinator starts workers.
            pool.max_workers = 16
    assert "baton scale prefill 2" in doctor.diagnose(behind[0])[0].first
    assert "baton scale decode 2" in doctor.diagnose(behind[1])[0].first


def test_an_elastic_cell_is_not_told_to_keep_prompts_off_decode_workers():
    status = prompts_beside_outputs().status()
    assert "decode.local_prefill: false" in doctor.diagnose(status)[0].first
    status.elastic = True
    [finding] = [one for one in doctor.diagnose(status) if one.kind is Kind.DECODE_INTERFERENCE]
    assert "local_prefill" not in finding.first
    assert "steps.longest_gap_ms" in finding.first


def test_gaps_that_were_chosen_are_no_finding():
    """With a longest gap of 200 ms, steps of 100 ms between tokens are as intended."""
    cell = long_gaps(200)
    [lane] = [one for one in cell.status().lanes if one.info.lane == common_pb2.LANE_INTERACTIVE]
    assert lane.itl_attained < lane.targets.percentile / 100 <= lane.gap_attained
    assert lane.mean_gap.ToNanoseconds() < lane.targets.itl_ms * 1e6
    assert Kind.DECODE_INTERFERENCE not in {one.kind for one in found(cell)}


def test_gaps_over_the_chosen_length_are_a_finding():
    for longest_gap_ms in (None, 80):
        (evidence,) = (
            one.evidence
            for one in found(long_gaps(longest_gap_ms))
            if one.kind is Kind.DECODE_INTERFERENCE
        )
        assert f"single gaps may take {longest_gap_ms or 60} ms" in evidence[1]


def test_gaps_are_compared_with_the_itl_target_of_an_earlier_coordinator():
    """It does not tell how many gaps were within the longest gap."""
    status = long_gaps(None).status()
    for lane in status.lanes:
        for field in ("gap_attained", "mean_gap"):
            lane.ClearField(field)
    status.decode.num_over_gap = status.decode.num_over_gap_mixed = 0
    assert Kind.DECODE_INTERFERENCE in {one.kind for one in doctor.diagnose(status)}


def test_a_mean_gap_over_the_target_is_a_finding_however_long_single_gaps_may_be():
    cell = long_gaps(1000, rate=30)
    assert Kind.DECODE_INTERFERENCE in {one.kind for one in found(cell)}


def test_few_gaps_that_move_the_mean_over_the_target_are_a_finding():
    """The handoff before the second token takes 2 s; 97 % of the gaps are short."""
    cell = LiveCell().workers(handoff_s=2.0).load(2, 100, 31).after(20)
    [lane] = [one for one in cell.status().lanes if one.info.lane == common_pb2.LANE_INTERACTIVE]
    assert lane.itl_attained >= lane.targets.percentile / 100
    assert lane.itl.p95_us < lane.targets.itl_ms * 1e3 < lane.mean_gap.ToNanoseconds() / 1e3
    [finding] = found(cell)
    assert finding.kind is Kind.SLOW_HANDOFFS
    assert any("over the target" in one for one in finding.evidence)
    assert finding.weight > 1


def test_an_elastic_cell_is_told_to_add_any_worker():
    """Any worker computes prompts and decodes, so that no advice asks for workers of one role."""
    queue = elastic(more_than_one_worker_computes().status())
    assert "add a worker: baton worker --role decode (or prefill" in first(queue, Kind.QUEUE)
    full = elastic(full_caches().status())
    for pool in full.pools:
        pool.kv_tokens_used = pool.kv_tokens_total
    assert "add a worker: baton worker --role decode (or prefill" in first(full, Kind.KV_FULL)
    batch = elastic(many_at_once().status())
    assert first(batch, Kind.BATCH_TOO_LARGE).startswith("add workers, or")
    late = elastic(a_peak_with_a_limit().status())
    assert first(late, Kind.ADMISSION).startswith("add workers, or")
    # The coordinator starts workers, and one pool is at its maximum.
    prefill, decode = queue.pools
    prefill.max_workers, decode.max_workers = 1, 16
    assert "add a worker: baton scale decode 2" in first(queue, Kind.QUEUE)
    decode.max_workers = 1
    assert "scaling.prefill.max_workers or scaling.decode.max_workers" in first(queue, Kind.QUEUE)
    decode.num_starting = 1
    assert "will be too late" in first(queue, Kind.QUEUE)


def test_a_pool_at_its_ceiling_says_so():
    status = more_than_one_worker_computes().status()
    for pool in status.pools:
        pool.max_workers = 1
    (finding,) = doctor.diagnose(status)
    assert "scaling.prefill.max_workers" in finding.first
    status.pools[0].num_starting = 1
    (finding,) = doctor.diagnose(status)
    assert "scaling lags" in " ".join(finding.evidence)


def test_a_full_decode_pool_that_cannot_grow_is_not_told_to():
    status = full_caches().status()
    decode = next(pool for pool in status.pools if pool.role == common_pb2.ROLE_DECODE)
    decode.max_workers = 16
    assert first(status, Kind.KV_FULL).startswith("add a decode worker: baton scale decode 2")
    decode.num_serving = 16
    limit = "raise scaling.decode.max_workers: the pool is at its limit of 16, or limit outputs"
    assert first(status, Kind.KV_FULL).startswith(limit)
    decode.num_serving, decode.num_starting = 1, 1
    assert first(status, Kind.KV_FULL).startswith("keep more decode workers running")


def test_how_long_a_cell_is_up_does_not_go_by_the_wall_clock(monkeypatch):
    cell = healthy()
    # The wall clock may be set, for example by NTP.
    monkeypatch.setattr(admin.time, "time", lambda: 0.0)
    assert to_seconds(cell.status().uptime) == pytest.approx(cell.now)
