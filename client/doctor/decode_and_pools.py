"""Findings about inter-token latency, pools, workers, recoveries and handoffs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.client.doctor.findings import (
    Finding,
    Kind,
    add_worker_advice,
    add_workers_advice,
    keep_warm_advice,
    lane_of,
    ms,
    needs_first_worker,
    percent,
    pool_groups,
)
from baton.runtime.enum_names import role_name
from baton.v1 import admin_pb2, common_pb2

# Minimum number of inter-token gaps for a finding.
_MIN_GAPS = 50
# Share of handoffs that failed or fell back, and share of memory in use, that cause a finding.
_FAILED_SHARE, _FULL_SHARE = 0.02, 0.9


def itl_findings(
    status: admin_pb2.GetStatusResponse, lane: admin_pb2.LaneStatus
) -> Iterator[Finding]:
    """Yields why the inter-token latency of a lane misses its target.

    The target bounds the mean gap of a stream; single gaps may take up to the longest gap, which
    the coordinator or an operator may choose longer than the target.
    """
    wanted = lane.targets.percentile / 100
    if not lane.targets.itl_ms or lane.itl.num < _MIN_GAPS:
        return
    mean_us = lane.mean_gap.ToNanoseconds() // 1000
    is_mean_missed = mean_us > lane.targets.itl_ms * 1000
    # A few very long gaps may move the mean over the target that most gaps meet.
    if lane.itl_attained >= wanted and not is_mean_missed:
        return
    # A coordinator of an earlier version compares gaps only with the ITL target.
    knows_gaps = lane.HasField("gap_attained")
    if knows_gaps and not is_mean_missed and lane.gap_attained >= wanted:
        return
    decode = status.decode
    slow = _slow_steps(status, lane)
    num_slow, num_slow_mixed = slow.num, slow.num_mixed
    if knows_gaps and not is_mean_missed:
        num_slow, num_slow_mixed = slow.num_over_gap, slow.num_over_gap_mixed
    evidence = [
        f"ITL p50 {ms(lane.itl.p50_us)}, p95 {ms(lane.itl.p95_us)}, p99 {ms(lane.itl.p99_us)}; "
        f"the target is {lane.targets.itl_ms} ms, met by {percent(lane.itl_attained)} of "
        f"{lane.itl.num} gaps",
        *(
            [
                f"single gaps may take {lane.targets.longest_gap_ms:g} ms, as "
                f"{percent(lane.gap_attained)} of them do"
            ]
            if knows_gaps and lane.targets.longest_gap_ms > lane.targets.itl_ms
            else []
        ),
        *([f"the mean gap is {ms(mean_us)}: over the target"] if is_mean_missed else []),
        f"steps without prompts take p95 {ms(decode.steps.p95_us)} "
        f"(batch size p50 {decode.batch_p50:.0f}, p95 {decode.batch_p95:.0f}); steps with prompts "
        f"take p95 {ms(decode.mixed_steps.p95_us)}",
    ]
    weight = max(lane.itl.p95_us, mean_us) / (lane.targets.itl_ms * 1000)
    name = lane_of(lane)
    # Only batch requests are parked. If most of the gaps are short, the long ones are their waits.
    is_parked = bool(status.num_parked) and lane.info.lane == common_pb2.LANE_BATCH
    if is_parked and (lane.itl_attained >= wanted or not num_slow + num_slow_mixed):
        yield Finding(
            Kind.QUEUE,
            f"{name}: tokens are late: requests were parked to make room for interactive ones",
            "queue",
            (*evidence, f"batch requests were parked {status.num_parked} times"),
            f"nothing, if batch requests may wait; otherwise {_add_decode_advice(status)}",
            weight,
        )
    elif num_slow_mixed and num_slow_mixed >= num_slow:
        yield Finding(
            Kind.DECODE_INTERFERENCE,
            f"{name}: tokens are late: decode workers compute prompts between them",
            "decode",
            (
                *evidence,
                f"{num_slow_mixed} late tokens came from steps with a prompt, "
                f"{num_slow} from steps without",
            ),
            "add workers, or set steps.longest_gap_ms to the ITL target: steps then have less time "
            "for prompts"
            if status.elastic
            else "keep prompts off the decode workers: decode.local_prefill: false, more prefill "
            "workers, or smaller steps (decode.engine_args.max_num_batched_tokens)",
            weight,
        )
    elif num_slow:
        yield Finding(
            Kind.BATCH_TOO_LARGE,
            f"{name}: tokens are late: the decode batch is too large for the target",
            "decode",
            tuple(evidence),
            f"add {'' if status.elastic else 'decode '}workers, or fewer requests on each "
            "(decode.max_requests_per_worker, the engine's max_num_seqs)",
            weight,
        )
    elif _handoff_us(lane) > lane.targets.itl_ms * 1000:
        yield Finding(
            Kind.SLOW_HANDOFFS,
            f"{name}: the second token is late: the handoff takes longer than the ITL target",
            "handoff",
            (*evidence, f"exposed handoff p95 {ms(_handoff_us(lane))}"),
            "see in `baton workers` which transport each pair of workers uses, and why",
            weight,
        )
    elif not status.num_recoveries:
        yield Finding(
            Kind.NETWORK,
            f"{name}: tokens are late although the engine steps meet the target",
            "network",
            tuple(evidence),
            "check the network between decode workers and coordinator, and the coordinator's CPU",
            weight,
        )


def _slow_steps(
    status: admin_pb2.GetStatusResponse, lane: admin_pb2.LaneStatus
) -> admin_pb2.SlowSteps:
    """Outputs in steps longer than the lane's targets."""
    if lane.HasField("slow_steps"):
        return lane.slow_steps
    # A coordinator of an earlier version reports only by the targets of the interactive lane.
    decode = status.decode
    return admin_pb2.SlowSteps(
        num=decode.num_slow,
        num_mixed=decode.num_slow_mixed,
        num_over_gap=decode.num_over_gap,
        num_over_gap_mixed=decode.num_over_gap_mixed,
    )


def _add_decode_advice(status: admin_pb2.GetStatusResponse) -> str:
    decode = next((pool for pool in status.pools if pool.role == common_pb2.ROLE_DECODE), None)
    if status.elastic or decode is None:
        return add_workers_advice(status)
    return add_worker_advice(decode)


def _handoff_us(lane: admin_pb2.LaneStatus) -> int:
    """95th percentile of the exposed handoff time in microseconds; 0 without handoffs."""
    return next(
        (one.times.p95_us for one in lane.stages if one.stage == common_pb2.STAGE_HANDOFF), 0
    )


def pool_findings(status: admin_pb2.GetStatusResponse) -> Iterator[Finding]:
    """Yields missing workers, full KV caches and full staging memory."""
    for group in pool_groups(status):
        if (missing := _no_workers(status, group)) is not None:
            yield missing
        if (full := _kv_full(status, group)) is not None:
            yield full
    for worker in status.workers:
        used = worker.staging_bytes_used / (worker.staging_bytes_total or 1)
        if used >= _FULL_SHARE:
            yield Finding(
                Kind.STAGING_FULL,
                f"staging of {worker.worker_id} is nearly full: further handoffs wait for memory",
                "handoff",
                (f"{percent(used)} of {worker.staging_bytes_total / 2**20:.0f} MiB are in use",),
                "raise kv_transfer.send_bytes and .receive_bytes (they must fit /dev/shm)",
                used / _FULL_SHARE,
            )


def _no_workers(
    status: admin_pb2.GetStatusResponse, group: Sequence[admin_pb2.PoolInfo]
) -> Finding | None:
    """Returns the finding that no worker of these pools serves; None if none is missing."""
    if not needs_first_worker(status, group):
        return None
    queued = [lane for lane in status.lanes if lane.info.num_queued]
    active = [pool for pool in group if pool.desired or not pool.sizes_itself]
    waits = ", ".join(
        f"{lane.info.num_queued} {lane_of(lane)} requests wait, the longest for "
        f"{ms(lane.info.oldest_wait.ToNanoseconds() // 1000)}"
        for lane in queued
    )
    num_starting = sum(pool.num_starting for pool in group)
    problems = [f"last failed start: {pool.problem}" for pool in group if pool.problem]
    # Starting a worker of one pool is enough: preferably of a pool that should have workers.
    pool = next((one for one in group if one.desired), next(iter(active), group[0]))
    name = role_name(pool.role)
    return Finding(
        Kind.COLD_STARTS if num_starting else Kind.NO_WORKERS,
        "no worker serves" if status.elastic else f"no {name} worker serves",
        "queue",
        (
            waits or "no request waits for a worker yet",
            f"{num_starting} are starting, {sum(one.num_draining for one in group)} are draining",
            *problems,
        ),
        keep_warm_advice(name) if num_starting and not problems else _start_advice(pool, name),
        100.0,
    )


def _kv_full(
    status: admin_pb2.GetStatusResponse, group: Sequence[admin_pb2.PoolInfo]
) -> Finding | None:
    """Returns the finding that the KV cache of these pools is nearly full; None if it is not."""
    decode = next((pool for pool in group if pool.role == common_pb2.ROLE_DECODE), None)
    total = sum(pool.kv_tokens_total for pool in group)
    used = sum(pool.kv_tokens_used for pool in group) / (total or 1)
    if decode is None or used < _FULL_SHARE:
        return None
    return Finding(
        Kind.KV_FULL,
        "the KV cache of the workers is nearly full"
        if status.elastic
        else "the decode pool's KV cache is nearly full",
        "queue",
        (
            f"{sum(pool.num_running for pool in group)} requests hold {percent(used)} of {total} "
            f"tokens; {sum(pool.num_waiting for pool in group)} requests wait at the workers",
        ),
        f"{add_workers_advice(status) if status.elastic else add_worker_advice(decode)}, or limit "
        "outputs (lanes.*.max_output_tokens)",
        used / _FULL_SHARE,
    )


def _start_advice(pool: admin_pb2.PoolInfo, name: str) -> str:
    if pool.max_workers and not pool.desired and not pool.sizes_itself:
        return f"baton scale {name} 1: the pool's size is set to 0"
    if pool.max_workers:
        return f"`baton why {name}` and the log of `baton up` say why no worker starts"
    return f"start a worker (baton worker --role {name}), or find out why no worker attaches"


def recovery_findings(status: admin_pb2.GetStatusResponse) -> Iterator[Finding]:
    """Yields a finding if workers were lost or requests were recovered."""
    if not (status.num_recoveries or status.num_workers_lost):
        return
    silent = [one for one in status.workers if one.unresponsive]
    yield Finding(
        Kind.RECOVERIES,
        "workers were lost or did not respond; their requests continue on others if possible",
        "recovery",
        (
            f"lost attempts: {status.num_recoveries}; lost workers: {status.num_workers_lost}; "
            f"workers that did not respond: {status.num_workers_unresponsive}",
            *(f"{one.worker_id} {one.unresponsive}" for one in silent),
        ),
        "read the logs of the lost workers (memory, devices, network)",
        2.0,
    )


def handoff_findings(status: admin_pb2.GetStatusResponse) -> Iterator[Finding]:
    """Yields a finding if many handoffs failed or fell back to another transport."""
    handoffs = status.handoffs
    num_bad = handoffs.num_fallbacks + handoffs.num_failures
    num_all = handoffs.exposed.num + handoffs.num_failures
    if not num_bad or num_bad < _FAILED_SHARE * num_all:
        return
    yield Finding(
        Kind.HANDOFF_FALLBACKS,
        "handoffs fail or fall back to another transport",
        "handoff",
        (
            f"of {num_all} ended handoffs {handoffs.num_failures} failed (their prompts are "
            f"computed again); a transport failed {handoffs.num_fallbacks} times and the next one "
            "took over",
            f"exposed time of successful handoffs: p95 {ms(handoffs.exposed.p95_us)}",
        ),
        "see in `baton workers` which transport each pair of workers uses and why, and in the "
        "workers' logs why handoffs failed",
        # A fallback may belong to a handoff that has not ended, or that was cancelled.
        1 + min(1.0, num_bad / max(1, num_all)),
    )
