"""Findings about late first tokens (TTFT) and refused requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.client.doctor.findings import (
    Finding,
    Kind,
    add_workers_advice,
    keep_warm_advice,
    lacks_workers,
    lane_of,
    ms,
    percent,
    pool_groups,
    stage_breakdown,
    stage_share,
)
from baton.runtime.enum_names import role_name
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import admin_pb2, common_pb2

# Minimum number of requests, and of waits, for a finding.
_MIN_REQUESTS, _MIN_WAITS = 8, 5
# A tenant is treated unfairly if its waits are this many times as long as another tenant's.
_UNFAIR_RATIO = 4.0
# A TTFT of this many times its target means overload, which one more worker would not end.
_OVERLOAD_RATIO = 10.0
# Share of refused requests that causes a finding.
_REFUSED_SHARE = 0.01
_NETWORK = (common_pb2.STAGE_NETWORK, common_pb2.STAGE_TOKENIZE)
_PREFILL = (common_pb2.STAGE_PREFILL,)
_RECOVERY = (common_pb2.STAGE_RECOVERY,)


def ttft_findings(
    status: admin_pb2.GetStatusResponse, lane: admin_pb2.LaneStatus
) -> Iterator[Finding]:
    """Yields why the first tokens of a lane are late or its requests are refused."""
    shed = _refusals(status, lane)
    if shed is not None:
        yield shed
    if not lane.targets.ttft_ms:
        return
    waits = _first_token_waits(lane)
    oldest_us = waits.oldest.ToNanoseconds() // 1000
    # `ttft_attained` is about the requests that had a target. A lane may have got its target later.
    num_with_target = lane.ttft_ratio.num
    is_late = (
        num_with_target >= _MIN_REQUESTS and lane.ttft_attained < lane.targets.percentile / 100
    )
    is_stuck = _oldest_ratio(lane) > 2 and waits.num >= _MIN_REQUESTS
    # If targets grow with the prompt, even a long wait can be in time.
    unfair = None
    if is_late or is_stuck or not lane.targets.ttft_ms_per_1k_tokens:
        unfair = _unfair(lane)
    if unfair is not None:
        yield unfair
    if not (is_late or is_stuck) or any(map(lacks_workers, pool_groups(status))):
        return
    late: dict[int, int] = {one.stage: one.sum_us for one in lane.late}
    if not lane.num_late:
        # No waiting request has had its first token yet.
        late = {common_pb2.STAGE_QUEUE: oldest_us}
    finding = _cold_start(status, lane)
    # If workers were lost, `recovery_findings` says so. If only one tenant waits, adding a worker
    # does not help.
    if stage_share(late, _RECOVERY) < 0.5 and finding is None and unfair is None:
        if stage_share(late, _NETWORK) >= 0.5:
            finding = _network(lane, late)
        elif stage_share(late, _PREFILL) >= 0.5:
            finding = _slow_prefill(lane, late)
        elif shed is None and max(lane.ttft_ratio.p99, _oldest_ratio(lane)) >= _OVERLOAD_RATIO:
            finding = _overload(status, lane, oldest_us)
        elif shed is None:
            finding = _queue(status, lane, late, oldest_us)
    if finding is not None:
        yield finding


def _ttft_evidence(lane: admin_pb2.LaneStatus) -> str:
    """Evidence: TTFT percentiles and the target."""
    met = "no request with this target has had its first token yet"
    if lane.ttft_ratio.num:
        met = f"met by {percent(lane.ttft_attained)} of {lane.ttft_ratio.num} requests"
    return (
        f"TTFT p50 {ms(lane.ttft.p50_us)}, p95 {ms(lane.ttft.p95_us)}, p99 "
        f"{ms(lane.ttft.p99_us)}; the target is {_target(lane)} "
        f"(p{lane.targets.percentile:g}), {met}"
    )


def _target(lane: admin_pb2.LaneStatus) -> TtftTarget | None:
    return TtftTarget.from_ms(lane.targets.ttft_ms, lane.targets.ttft_ms_per_1k_tokens)


def _first_token_waits(lane: admin_pb2.LaneStatus) -> admin_pb2.FirstTokenWaits:
    """Requests that wait for their first token, and the one that arrived first of them."""
    if lane.HasField("first_token_waits"):
        return lane.first_token_waits
    # A coordinator of an earlier version reports only on all waiting requests.
    if not lane.info.num_queued:
        return admin_pb2.FirstTokenWaits()
    return admin_pb2.FirstTokenWaits(
        num=lane.info.num_queued,
        oldest=lane.info.oldest_wait,
        oldest_target=lane.oldest_ttft_target,
    )


def _oldest_ratio(lane: admin_pb2.LaneStatus) -> float:
    """Time that the oldest request has waited for its first token, divided by its TTFT target."""
    waits = _first_token_waits(lane)
    target_ns = waits.oldest_target.ToNanoseconds()
    return waits.oldest.ToNanoseconds() / target_ns if target_ns else 0.0


def _times_target(lane: admin_pb2.LaneStatus, *, waits: bool = False) -> float:
    """95th percentile of TTFT / target; with `waits`, at least the ratio of the longest wait."""
    return max(lane.ttft_ratio.p95, _oldest_ratio(lane) if waits else 0.0)


def _network(lane: admin_pb2.LaneStatus, late: Mapping[int, int]) -> Finding:
    evidence = [_ttft_evidence(lane), stage_breakdown(late)]
    if lane.tiny.num:
        evidence.append(f"prompts of 64 tokens and less take {ms(lane.tiny.p50_us)} (p50) too")
    return Finding(
        Kind.NETWORK,
        f"{lane_of(lane)}: first tokens are late, for short prompts too: the time is spent between "
        "the processes",
        "network",
        tuple(evidence),
        "check the network between coordinator and workers (round-trip times, workers in another "
        "zone) and the coordinator's CPU; more workers do not help",
        _times_target(lane),
    )


def _slow_prefill(lane: admin_pb2.LaneStatus, late: Mapping[int, int]) -> Finding:
    prefill = next(
        (one.times for one in lane.stages if one.stage == common_pb2.STAGE_PREFILL), None
    )
    evidence = [_ttft_evidence(lane), stage_breakdown(late)]
    if prefill is not None:
        evidence.append(f"prefill p50 {ms(prefill.p50_us)}, p95 {ms(prefill.p95_us)}")
    if lane.itl.num:
        evidence.append(f"later tokens are fast: ITL p95 {ms(lane.itl.p95_us)}")
    return Finding(
        Kind.PREFILL,
        f"{lane_of(lane)}: first tokens are late: computing the prompts takes most of the time",
        "prefill",
        tuple(evidence),
        "give prefill faster workers (more tensor parallelism or a faster GPU; a prompt runs on "
        "one worker, so more workers do not help), let prompts share prefixes, or "
        "limit them (lanes.*.max_prompt_tokens)",
        _times_target(lane),
    )


def _queue(
    status: admin_pb2.GetStatusResponse,
    lane: admin_pb2.LaneStatus,
    late: Mapping[int, int],
    oldest_us: int,
) -> Finding:
    evidence = [
        _ttft_evidence(lane),
        stage_breakdown(late),
        f"without queueing, TTFT would be p95 {ms(lane.served.p95_us)}",
        f"{_first_token_waits(lane).num} requests wait, the oldest for {ms(oldest_us)}",
    ]
    if lane.tiny.num >= _MIN_WAITS and lane.tiny.p50_us > lane.targets.ttft_ms * 1000:
        evidence.append(f"prompts of 64 tokens and less take {ms(lane.tiny.p50_us)} (p50) too")
    starting = sum(pool.num_starting for pool in status.pools)
    if starting:
        evidence.append(f"{starting} workers are starting: scaling lags behind the load")
    return Finding(
        Kind.QUEUE,
        f"{lane_of(lane)}: first tokens are late: requests wait for a worker",
        "queue",
        tuple(evidence),
        add_workers_advice(status),
        _times_target(lane, waits=True),
    )


def _overload(
    status: admin_pb2.GetStatusResponse, lane: admin_pb2.LaneStatus, oldest_us: int
) -> Finding:
    name = lane_of(lane)
    limit = (
        "has no limit" if not lane.HasField("admission_ttft") else "has a limit that is too high"
    )
    return Finding(
        Kind.ADMISSION,
        f"{name}: first tokens are far too late: more requests are admitted than can be served",
        "queue",
        (
            _ttft_evidence(lane),
            f"{_first_token_waits(lane).num} requests wait, the oldest for {ms(oldest_us)}; "
            f"{lane.num_admitted} were admitted, {lane.num_ended} ended",
            f"without queueing, TTFT would be p95 {ms(lane.served.p95_us)}",
            f"admission {limit} (lanes.{name}.ttft_ms)",
        ),
        f"set lanes.{name}.ttft_ms, so that requests that would be late are refused at once with a "
        f"retry time; then {add_workers_advice(status)}",
        _times_target(lane, waits=True),
    )


def _refusals(status: admin_pb2.GetStatusResponse, lane: admin_pb2.LaneStatus) -> Finding | None:
    num_shed = sum(lane.sheds.values())
    num_requests = num_shed + lane.num_admitted
    if num_shed < _MIN_WAITS or num_shed < _REFUSED_SHARE * num_requests:
        return None
    worst = max(lane.sheds, key=lambda reason: lane.sheds[reason])
    add_to_pool = "add workers" if status.elastic else "add workers to the overloaded pool"
    remedies = {
        "queue_full": f"{add_to_pool}, or raise lanes.*.max_queued if a longer wait is better "
        "than a refusal",
        "too_late": f"add {'' if status.elastic else 'prefill '}workers, or raise the TTFT target "
        "of the requests",
        "tenant_rate": "raise tenants.NAME.tokens_per_s of the refused tenants, or change "
        "nothing: other tenants are not affected",
        "too_many_requests": "raise coordinator.max_running_requests, or add workers",
        "session_full": "raise coordinator.max_requests_per_session, or use more sessions",
    }
    reasons = ", ".join(
        f"{reason} {count}" for reason, count in sorted(lane.sheds.items(), key=lambda one: -one[1])
    )
    return Finding(
        Kind.ADMISSION,
        f"{lane_of(lane)}: {percent(num_shed / num_requests)} of the requests are refused",
        "admission",
        (f"{num_shed} of {num_requests} were not admitted: {reasons}",),
        remedies.get(worst, add_to_pool),
        1 + 10 * num_shed / num_requests,
    )


def _unfair(lane: admin_pb2.LaneStatus) -> Finding | None:
    tenants = sorted(
        (one for one in lane.tenants if one.wait.num >= _MIN_WAITS),
        key=lambda one: one.wait.p95_us,
    )
    if len(tenants) < 2:
        return None
    best, worst = tenants[0], tenants[-1]
    target_us = lane.targets.ttft_ms * 1000
    if best.wait.p95_us > target_us or worst.wait.p95_us < max(
        target_us, _UNFAIR_RATIO * best.wait.p95_us
    ):
        return None
    total = sum(one.num_tokens for one in lane.tenants) or 1
    is_big = worst.num_tokens >= best.num_tokens
    evidence = [
        f"{one.tenant}: waits p95 {ms(one.wait.p95_us)}, {percent(one.num_tokens / total)} of "
        f"the tokens, weight {one.weight:g}"
        for one in (worst, best)
    ]
    if is_big:
        first = (
            f"nothing, if {worst.tenant} exceeds its share: only this tenant waits; otherwise "
            f"raise tenants.{worst.tenant}.weight, or add workers"
        )
    else:
        first = (
            f"lower tenants.{best.tenant}.weight or limit the tenant "
            f"(tenants.{best.tenant}.max_concurrent, .tokens_per_s): it is served before "
            f"{worst.tenant}, which requests fewer tokens"
        )
    return Finding(
        Kind.FAIRNESS,
        f"{lane_of(lane)}: the {'big' if is_big else 'small'} tenant {worst.tenant} waits, "
        "other tenants do not",
        "queue",
        (*evidence, _ttft_evidence(lane)),
        first,
        worst.wait.p95_us / target_us,
    )


def _cold_start(status: admin_pb2.GetStatusResponse, lane: admin_pb2.LaneStatus) -> Finding | None:
    waits = lane.after_start
    if not waits.num or waits.p50_us <= lane.targets.ttft_ms * 1000:
        return None
    if 2 * waits.num < lane.num_late:
        return None
    latest = status.cold_starts[0] if status.cold_starts else None
    evidence = [
        f"{waits.num} requests waited for a worker that started after their arrival, p50 "
        f"{ms(waits.p50_us)}",
        _ttft_evidence(lane),
    ]
    name = role_name(latest.role) if latest is not None else "prefill"
    if latest is not None:
        lasted_us = latest.lasted.ToNanoseconds() // 1000
        evidence.append(f"the latest cold start, {latest.worker_id}, took {ms(lasted_us)}")
    return Finding(
        Kind.COLD_STARTS,
        f"{lane_of(lane)}: requests wait for workers to start",
        "queue",
        tuple(evidence),
        keep_warm_advice(name),
        _times_target(lane),
    )
