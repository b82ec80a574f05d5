"""Why first tokens are late, or requests are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from baton.client.doctor.findings import (
    Finding,
    Kind,
    lane_of,
    more_workers,
    ms,
    parts,
    percent,
    share,
    warm,
)
from baton.runtime.enum_names import role_name
from baton.v1 import admin_pb2, common_pb2

# Of fewer requests nothing is concluded.
_MIN_REQUESTS, _MIN_WAITS = 8, 5
# One tenant waits so many times longer than another.
_UNFAIR = 4.0
# A time to first token of so many targets is no longer a queue that a worker more would empty.
_EXPLODED = 10.0
# Of the requests, refused: from here on it is worth a word.
_SHED = 0.01
_NETWORK = (common_pb2.STAGE_NETWORK, common_pb2.STAGE_TOKENIZE)
_PREFILL = (common_pb2.STAGE_PREFILL,)


def first_tokens(
    status: admin_pb2.GetStatusResponse, lane: admin_pb2.LaneStatus
) -> Iterator[Finding]:
    shed = _shed(lane)
    if shed is not None:
        yield shed
    target_us = lane.targets.ttft_ms * 1000
    if not target_us:
        return
    unfair = _unfair(lane)
    if unfair is not None:
        yield unfair
    oldest_us = lane.info.oldest_wait.ToNanoseconds() // 1000 if lane.info.num_queued else 0
    is_late = lane.ttft.num >= _MIN_REQUESTS and lane.ttft_attained < lane.targets.percentile / 100
    is_stuck = oldest_us > 2 * target_us and lane.info.num_queued >= _MIN_REQUESTS
    if not (is_late or is_stuck) or any(pool.num_serving == 0 for pool in status.pools):
        return
    late: dict[int, int] = {one.stage: one.sum_us for one in lane.late}
    if not lane.num_late:
        # None of those that wait has had a first token yet.
        late = {common_pb2.STAGE_QUEUE: oldest_us}
    finding = _cold_start(status, lane)
    # Where one tenant waits and others do not, no worker is missing.
    if finding is None and unfair is None:
        if share(late, _NETWORK) >= 0.5:
            finding = _network(lane, late)
        elif share(late, _PREFILL) >= 0.5:
            finding = _slow_prefill(lane, late)
        elif shed is None and max(lane.ttft.p99_us, oldest_us) >= _EXPLODED * target_us:
            finding = _exploded(status, lane, oldest_us)
        elif shed is None:
            finding = _queue(status, lane, late, oldest_us)
    if finding is not None:
        yield finding


def _late(lane: admin_pb2.LaneStatus) -> str:
    """How late first tokens are."""
    return (
        f"TTFT p50 {ms(lane.ttft.p50_us)}, p95 {ms(lane.ttft.p95_us)}, p99 "
        f"{ms(lane.ttft.p99_us)}; the target is {lane.targets.ttft_ms} ms "
        f"(p{lane.targets.percentile:g}), kept by {percent(lane.ttft_attained)} of "
        f"{lane.ttft.num} requests"
    )


def _over(lane: admin_pb2.LaneStatus, oldest_us: int = 0) -> float:
    """How many times its target the time to first token is."""
    return max(lane.ttft.p95_us, oldest_us) / (lane.targets.ttft_ms * 1000)


def _network(lane: admin_pb2.LaneStatus, late: Mapping[int, int]) -> Finding:
    evidence = [_late(lane), parts(late)]
    if lane.tiny.num:
        evidence.append(f"prompts of 64 tokens and less take {ms(lane.tiny.p50_us)} (p50) too")
    return Finding(
        Kind.NETWORK,
        f"{lane_of(lane)}: first tokens are late whatever the prompt's length: the time "
        "goes between the processes",
        "network",
        tuple(evidence),
        "look at the way between coordinator and workers (round trips, a busy coordinator core, "
        "workers in another zone); no worker more would help",
        _over(lane),
    )


def _slow_prefill(lane: admin_pb2.LaneStatus, late: Mapping[int, int]) -> Finding:
    prefill = next(
        (one.times for one in lane.stages if one.stage == common_pb2.STAGE_PREFILL), None
    )
    evidence = [_late(lane), parts(late)]
    if prefill is not None:
        evidence.append(f"prefill p50 {ms(prefill.p50_us)}, p95 {ms(prefill.p95_us)}")
    if lane.itl.num:
        evidence.append(f"once tokens flow they are fast: ITL p95 {ms(lane.itl.p95_us)}")
    return Finding(
        Kind.PREFILL,
        f"{lane_of(lane)}: a long silence, then fast: computing the prompts takes the time",
        "prefill",
        tuple(evidence),
        "give prefill faster workers (more tensor parallelism or a faster GPU; a prompt runs on "
        "one worker, so that more workers do not shorten it), let prompts share prefixes, or "
        "limit them (lanes.*.max_prompt_tokens)",
        _over(lane),
    )


def _queue(
    status: admin_pb2.GetStatusResponse,
    lane: admin_pb2.LaneStatus,
    late: Mapping[int, int],
    oldest_us: int,
) -> Finding:
    evidence = [
        _late(lane),
        parts(late),
        f"without the queues it would be p95 {ms(lane.served.p95_us)}",
        f"{lane.info.num_queued} wait, the longest for {ms(oldest_us)}",
    ]
    if lane.tiny.num >= _MIN_WAITS and lane.tiny.p50_us > lane.targets.ttft_ms * 1000:
        evidence.append(f"prompts of 64 tokens and less take {ms(lane.tiny.p50_us)} (p50) too")
    starting = sum(pool.num_starting for pool in status.pools)
    if starting:
        evidence.append(f"{starting} workers are starting: scaling lags behind the load")
    return Finding(
        Kind.QUEUE,
        f"{lane_of(lane)}: fast alone, slow under load: requests wait for a worker",
        "queue",
        tuple(evidence),
        more_workers(status),
        _over(lane, oldest_us),
    )


def _exploded(
    status: admin_pb2.GetStatusResponse, lane: admin_pb2.LaneStatus, oldest_us: int
) -> Finding:
    name = lane_of(lane)
    limit = "has no limit" if not lane.HasField("admission_ttft") else "has a limit that is too lax"
    return Finding(
        Kind.ADMISSION,
        f"{name}: latency explodes: more is let in than can be served",
        "queue",
        (
            _late(lane),
            f"{lane.info.num_queued} wait, the longest for {ms(oldest_us)}; "
            f"{lane.num_admitted} were let in, {lane.num_ended} ended",
            f"without the queues it would be p95 {ms(lane.served.p95_us)}",
            f"admission {limit} (lanes.{name}.ttft_ms)",
        ),
        f"set lanes.{name}.ttft_ms, so that what would be late is refused at once with the time to "
        f"come back; then {more_workers(status)}",
        _over(lane, oldest_us),
    )


def _shed(lane: admin_pb2.LaneStatus) -> Finding | None:
    num_shed = sum(lane.sheds.values())
    num_asked = num_shed + lane.num_admitted
    if num_shed < _MIN_WAITS or num_shed < _SHED * num_asked:
        return None
    worst = max(lane.sheds, key=lambda reason: lane.sheds[reason])
    cures = {
        "queue_full": "add workers to the pool that is behind, or raise lanes.*.max_queued where a "
        "longer wait is better than a refusal",
        "too_late": "add prefill workers, or raise the time to first token that is asked for",
        "tenant_rate": "raise tenants.NAME.tokens_per_s of those who are refused, or leave it: "
        "others are not affected",
        "too_many_requests": "raise coordinator.max_running_requests, or add workers",
        "session_full": "raise coordinator.max_requests_per_session, or use more sessions",
    }
    reasons = ", ".join(
        f"{reason} {count}" for reason, count in sorted(lane.sheds.items(), key=lambda one: -one[1])
    )
    return Finding(
        Kind.ADMISSION,
        f"{lane_of(lane)}: {percent(num_shed / num_asked)} of the requests are refused",
        "admission",
        (f"{num_shed} of {num_asked} were not admitted: {reasons}",),
        cures.get(worst, "add workers to the pool that is behind"),
        1 + 10 * num_shed / num_asked,
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
        target_us, _UNFAIR * best.wait.p95_us
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
            f"nothing, if {worst.tenant} asks for more than its share: only it waits; otherwise "
            f"raise tenants.{worst.tenant}.weight, or add workers"
        )
    else:
        first = (
            f"lower tenants.{best.tenant}.weight or bound it "
            f"(tenants.{best.tenant}.max_concurrent, .tokens_per_s): it is served before "
            f"{worst.tenant}, which asks for less"
        )
    return Finding(
        Kind.FAIRNESS,
        f"{lane_of(lane)}: the {'big' if is_big else 'small'} tenant {worst.tenant} waits, "
        "others do not",
        "queue",
        (*evidence, _late(lane)),
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
        f"{waits.num} requests were sent to a worker that came after them, and waited p50 "
        f"{ms(waits.p50_us)} for it",
        _late(lane),
    ]
    name = role_name(latest.role) if latest is not None else "prefill"
    if latest is not None:
        lasted_us = latest.lasted.ToNanoseconds() // 1000
        evidence.append(f"the latest, {latest.worker_id}, took {ms(lasted_us)} to start")
    return Finding(
        Kind.COLD_STARTS,
        f"{lane_of(lane)}: requests wait for workers to start",
        "queue",
        tuple(evidence),
        warm(name),
        _over(lane),
    )
