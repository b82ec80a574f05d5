"""Builds the status message that `baton top`, `baton doctor` and the dashboard show."""

from __future__ import annotations

from collections.abc import Iterable

from baton.coordinator.core.core import Core
from baton.coordinator.server.lane_targets import lane_targets
from baton.coordinator.state.lanes import lane_config
from baton.coordinator.state.workers import Worker
from baton.coordinator.telemetry.recent import WINDOW_S, LaneWindow, Window
from baton.coordinator.telemetry.sketch import Sketch
from baton.runtime.config import BatonConfig
from baton.runtime.durations import duration
from baton.v1 import admin_pb2, common_pb2

_PERCENTS = (50, 95, 99)
_COLD_STARTS_S = 3600.0
# Maximum number of tenants listed per lane; those with the most tokens come first.
_MAX_TENANTS = 16
# Interval of the samples in the history, and number of samples kept.
SAMPLE_S, MAX_SAMPLES = 5.0, 180


def status(
    core: Core,
    pools: Iterable[admin_pb2.PoolInfo],
    lanes: Iterable[admin_pb2.LaneInfo],
    now: float,
    wall_s: float,
    config: BatonConfig,
) -> admin_pb2.GetStatusResponse:
    """Builds the status, without the model and the history.

    Args:
        core: the core.
        pools: present state of the pools.
        lanes: present state of the lanes.
        now: time by the core's clock.
        wall_s: the same time in seconds since 1970.
        config: effective configuration.
    """
    stats = core.stats
    window = stats.recent.window(now)
    found = admin_pb2.GetStatusResponse(
        window=duration(WINDOW_S),
        pools=pools,
        lanes=[_lane(info, config, core, window.lanes[info.lane], window, now) for info in lanes],
        workers=sorted(
            (_worker(worker, now, config) for worker in core.workers),
            key=lambda one: (one.role, one.worker_id),
        ),
        decode=_decode(window, core),
        handoffs=admin_pb2.HandoffStatus(
            exposed=percentiles(window.exposed),
            num_fallbacks=window.counts["handoff_fallbacks"],
            num_failures=window.counts["handoff_failures"],
        ),
        num_recoveries=window.counts["recoveries"],
        num_parked=window.counts["parked"],
        num_workers_lost=window.counts["workers_lost"],
        num_workers_unresponsive=window.counts["workers_unresponsive"],
        elastic=config.is_elastic,
        prompt_tokens=admin_pb2.PromptTokens(**window.prompt_tokens),
    )
    found.at.FromMicroseconds(round(wall_s * 1e6))
    for start in reversed(stats.latest_cold_starts):
        age_s = now - start.at
        if age_s <= _COLD_STARTS_S:
            told = found.cold_starts.add(worker_id=start.worker_id, role=start.role)
            told.at.FromMicroseconds(round((wall_s - age_s) * 1e6))
            told.lasted.CopyFrom(duration(start.lasted_s))
    return found


def sample(
    core: Core,
    pools: Iterable[admin_pb2.PoolInfo],
    lanes: Iterable[admin_pb2.LaneInfo],
    now: float,
    wall_s: float,
) -> admin_pb2.StatusSample:
    """Builds a sample for the history; arguments as in `status`."""
    found = admin_pb2.StatusSample(
        pools=[
            admin_pb2.PoolSample(
                role=pool.role,
                num_serving=pool.num_serving,
                num_starting=pool.num_starting,
                num_draining=pool.num_draining,
                num_running=pool.num_running,
                kv_used=pool.kv_tokens_used / (pool.kv_tokens_total or 1),
            )
            for pool in pools
        ]
    )
    found.at.FromMicroseconds(round(wall_s * 1e6))
    for lane in lanes:
        (ttft_s,), (itl_s,) = (
            one.percentiles_s((95,)) for one in core.stats.recent.lane(lane.lane, now)
        )
        found.lanes.add(
            lane=lane.lane,
            num_queued=lane.num_queued,
            num_running=lane.num_running,
            ttft_p95_us=round(ttft_s * 1e6),
            itl_p95_us=round(itl_s * 1e6),
        )
    return found


def percentiles(sketch: Sketch) -> admin_pb2.Percentiles:
    p50_s, p95_s, p99_s = sketch.percentiles_s(_PERCENTS)
    return admin_pb2.Percentiles(
        num=sketch.num,
        p50_us=round(p50_s * 1e6),
        p95_us=round(p95_s * 1e6),
        p99_us=round(p99_s * 1e6),
        max_us=round(sketch.max_s * 1e6),
    )


def _ratios(sketch: Sketch) -> admin_pb2.Ratios:
    p50, p95, p99 = sketch.percentiles_s(_PERCENTS)
    return admin_pb2.Ratios(num=sketch.num, p50=p50, p95=p95, p99=p99)


def _lane(
    info: admin_pb2.LaneInfo,
    config: BatonConfig,
    core: Core,
    window: LaneWindow,
    cell: Window,
    now: float,
) -> admin_pb2.LaneStatus:
    lane = info.lane
    target, limits = core.targets.of_lane(lane), lane_config(config.lanes, lane)
    found = admin_pb2.LaneStatus(
        info=info,
        targets=lane_targets(lane, target),
        ttft=percentiles(window.ttft),
        ttft_ratio=_ratios(window.ttft_ratio),
        itl=percentiles(window.itl),
        e2e=percentiles(window.e2e),
        served=percentiles(window.served),
        tiny=percentiles(window.tiny),
        late=_sums(window.late_s.items()),
        tiny_stages=_sums(window.tiny_s.items()),
        stages=[
            admin_pb2.StageStatus(stage=stage, times=percentiles(times))
            for stage, times in window.all_stages().items()
        ],
        num_late=window.late.num,
        num_admitted=window.num_admitted,
        num_ended=window.num_ended,
        num_failed=window.num_failed,
        num_output_tokens=window.num_output_tokens,
        sheds=dict(window.sheds),
        after_start=percentiles(window.after_start),
        tenants=_tenants(config, window),
    )
    if limits.ttft_ms is not None:
        found.admission_ttft.CopyFrom(duration(limits.ttft_ms / 1e3))
    if window.ttft_ratio.num:
        found.ttft_attained = 1 - window.late.num / window.ttft_ratio.num
    if window.itl.num and target.itl_s is not None:
        found.itl_attained = 1 - window.itl.num_over(target.itl_s) / window.itl.num
    gap_s = core.gap_target_s(lane)
    if gap_s is not None:
        if lane == common_pb2.LANE_INTERACTIVE and core.longest_gap_s is not None:
            found.targets.longest_gap_ms = round(gap_s * 1e3, 3)
        if window.itl.num:
            found.gap_attained = 1 - window.itl.num_over(gap_s) / window.itl.num
    # With speculative decoding, a gap may bring several tokens.
    num_later_tokens = max(window.num_output_tokens - window.ttft.num, window.itl.num)
    if num_later_tokens:
        found.mean_gap.CopyFrom(duration(window.itl.total_s / num_later_tokens))
    found.slow_steps.CopyFrom(_slow_steps(cell, target.itl_s, gap_s))
    found.first_token_waits.CopyFrom(_first_token_waits(core, lane, now))
    oldest = core.oldest_queued(lane)
    oldest_s = core.targets.ttft_s(oldest.submission) if oldest is not None else None
    if oldest_s is not None:
        found.oldest_ttft_target.CopyFrom(duration(oldest_s))
    return found


def _first_token_waits(
    core: Core, lane: common_pb2.Lane.ValueType, now: float
) -> admin_pb2.FirstTokenWaits:
    waiting = core.queued_without_token(lane)
    found = admin_pb2.FirstTokenWaits(num=len(waiting))
    if waiting:
        oldest = min((one.submission for one in waiting), key=lambda one: one.arrived_at)
        found.oldest.CopyFrom(duration(now - oldest.arrived_at))
        if (target_s := core.targets.ttft_s(oldest)) is not None:
            found.oldest_target.CopyFrom(duration(target_s))
    return found


def _tenants(config: BatonConfig, window: LaneWindow) -> list[admin_pb2.TenantStatus]:
    served = sorted(window.tenants.items(), key=lambda one: -one[1].num_tokens)
    return [
        admin_pb2.TenantStatus(
            tenant=name,
            wait=percentiles(tenant.wait),
            ttft=percentiles(tenant.ttft),
            num_tokens=tenant.num_tokens,
            weight=config.tenants.get(name, config.tenant_defaults).weight,
        )
        for name, tenant in served[:_MAX_TENANTS]
    ]


def _sums(
    sums: Iterable[tuple[common_pb2.Stage.ValueType, float]],
) -> list[admin_pb2.StageSum]:
    return [
        admin_pb2.StageSum(stage=stage, sum_us=round(sum_s * 1e6)) for stage, sum_s in sorted(sums)
    ]


def _worker(worker: Worker, now: float, config: BatonConfig) -> admin_pb2.WorkerStatus:
    load = worker.load
    return admin_pb2.WorkerStatus(
        worker_id=worker.id,
        role=worker.role,
        state=worker.state,
        unresponsive=worker.trouble(now, config.coordinator.worker_silent_s),
        num_requests=len(worker.ledger),
        num_running=load.num_running if load is not None else 0,
        num_waiting=load.num_waiting if load is not None else 0,
        kv_tokens_used=load.kv_tokens_used if load is not None else 0,
        kv_tokens_total=worker.hello.capacity.kv_tokens,
        staging_bytes_used=load.staging_bytes_used if load is not None else 0,
        staging_bytes_total=load.staging_bytes_total if load is not None else 0,
        attached_for=duration(now - worker.attached_at),
        silent_for=duration(now - worker.heard_at),
    )


def _decode(window: Window, core: Core) -> admin_pb2.DecodeStatus:
    itl_s = core.targets.of_lane(common_pb2.LANE_INTERACTIVE).itl_s
    gap_s = core.gap_target_s(common_pb2.LANE_INTERACTIVE)
    p50, p95 = window.batch.percentiles_s((50, 95))
    slow = _slow_steps(window, itl_s, gap_s)
    return admin_pb2.DecodeStatus(
        steps=percentiles(window.steps),
        mixed_steps=percentiles(window.mixed_steps),
        num_slow=slow.num,
        num_slow_mixed=slow.num_mixed,
        batch_p50=p50,
        batch_p95=p95,
        num_over_gap=slow.num_over_gap,
        num_over_gap_mixed=slow.num_over_gap_mixed,
    )


def _slow_steps(window: Window, itl_s: float | None, gap_s: float | None) -> admin_pb2.SlowSteps:
    return admin_pb2.SlowSteps(
        num=_num_over(window.steps, itl_s),
        num_mixed=_num_over(window.mixed_steps, itl_s),
        num_over_gap=_num_over(window.steps, gap_s),
        num_over_gap_mixed=_num_over(window.mixed_steps, gap_s),
    )


def _num_over(sketch: Sketch, limit_s: float | None) -> int:
    """Number of values over a limit; 0 without a limit."""
    return 0 if limit_s is None else sketch.num_over(limit_s)
