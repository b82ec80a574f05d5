"""What is wrong with tokens after the first, with pools, workers and handoffs."""

from __future__ import annotations

from collections.abc import Iterator

from baton.client.doctor.findings import Finding, Kind, lane_of, ms, percent, warm
from baton.runtime.enum_names import role_name
from baton.v1 import admin_pb2, common_pb2

# Of fewer gaps nothing is concluded.
_MIN_GAPS = 50
# Shares from which on something is worth a word.
_FELL_BACK, _FULL = 0.02, 0.9


def gaps(status: admin_pb2.GetStatusResponse, lane: admin_pb2.LaneStatus) -> Iterator[Finding]:
    if (
        not lane.targets.itl_ms
        or lane.itl.num < _MIN_GAPS
        or lane.itl_attained >= lane.targets.percentile / 100
    ):
        return
    decode = status.decode
    evidence = [
        f"ITL p50 {ms(lane.itl.p50_us)}, p95 {ms(lane.itl.p95_us)}, p99 {ms(lane.itl.p99_us)}; "
        f"the target is {lane.targets.itl_ms} ms, kept by {percent(lane.itl_attained)} of "
        f"{lane.itl.num} gaps",
        f"steps that only decode take p95 {ms(decode.steps.p95_us)} "
        f"({decode.batch_p50:.0f} requests at once, p95 {decode.batch_p95:.0f}); those with a "
        f"prompt beside take p95 {ms(decode.mixed_steps.p95_us)}",
    ]
    weight = lane.itl.p95_us / (lane.targets.itl_ms * 1000)
    name = lane_of(lane)
    if decode.num_slow_mixed and decode.num_slow_mixed >= decode.num_slow:
        yield Finding(
            Kind.DECODE_INTERFERENCE,
            f"{name}: starts, then stutters: prompts are computed between the tokens",
            "decode",
            (
                *evidence,
                f"{decode.num_slow_mixed} late tokens came with a prompt, {decode.num_slow} "
                "without",
            ),
            "keep prompts off the decode workers: decode.local_prefill: false, more prefill "
            "workers, or smaller steps (decode.engine_args.max_num_batched_tokens)",
            weight,
        )
    elif decode.num_slow:
        yield Finding(
            Kind.BATCH_TOO_LARGE,
            f"{name}: starts, then stutters: the decode batch is too large for the target",
            "decode",
            tuple(evidence),
            "add decode workers, or fewer requests on each (decode.max_requests_per_worker, the "
            "engine's max_num_seqs)",
            weight,
        )
    elif _handoff_us(lane) > lane.targets.itl_ms * 1000:
        yield Finding(
            Kind.SLOW_HANDOFFS,
            f"{name}: the second token comes late: the handoff is longer than a gap may be",
            "handoff",
            (*evidence, f"exposed handoff p95 {ms(_handoff_us(lane))}"),
            "`baton workers` says by which transport each pair hands over, and why not by a better "
            "one",
            weight,
        )
    elif not status.num_recoveries:
        yield Finding(
            Kind.NETWORK,
            f"{name}: tokens come late though the steps that make them are in time",
            "network",
            tuple(evidence),
            "look at the way between decode workers and coordinator, and at the coordinator's core",
            weight,
        )


def _handoff_us(lane: admin_pb2.LaneStatus) -> int:
    """The 95th percentile of what handoffs add, 0 of none."""
    return next(
        (one.times.p95_us for one in lane.stages if one.stage == common_pb2.STAGE_HANDOFF), 0
    )


def pools(status: admin_pb2.GetStatusResponse) -> Iterator[Finding]:
    queued = [lane for lane in status.lanes if lane.info.num_queued]
    for pool in status.pools:
        name = role_name(pool.role)
        # One that sizes itself may be at rest, without a worker until somebody asks for something.
        rests = pool.sizes_itself and not pool.desired
        if pool.num_serving == 0 and (queued or not rests):
            waits = ", ".join(
                f"{lane.info.num_queued} {lane_of(lane)} requests wait, the longest for "
                f"{ms(lane.info.oldest_wait.ToNanoseconds() // 1000)}"
                for lane in queued
            )
            starts = pool.num_starting > 0
            problem = (f"the last that failed: {pool.problem}",) if pool.problem else ()
            yield Finding(
                Kind.COLD_STARTS if starts else Kind.NO_WORKERS,
                f"no {name} worker serves",
                "queue",
                (
                    waits or "nothing waits for one yet",
                    f"{pool.num_starting} are starting, {pool.num_draining} drain",
                    *problem,
                ),
                warm(name) if starts and not problem else _none_serves(pool, name),
                100.0,
            )
        used = pool.kv_tokens_used / (pool.kv_tokens_total or 1)
        if pool.role == common_pb2.ROLE_DECODE and used >= _FULL:
            yield Finding(
                Kind.KV_FULL,
                "the decode pool's KV cache is nearly full",
                "queue",
                (
                    f"{percent(used)} of {pool.kv_tokens_total} tokens are held by "
                    f"{pool.num_running} requests; {pool.num_waiting} wait at the workers",
                ),
                f"add decode workers (baton scale decode {pool.num_serving + 1}), or bound outputs "
                "(lanes.*.max_output_tokens)",
                used / _FULL,
            )
    for worker in status.workers:
        used = worker.staging_bytes_used / (worker.staging_bytes_total or 1)
        if used >= _FULL:
            yield Finding(
                Kind.STAGING_FULL,
                f"staging of {worker.worker_id} is nearly full: handoffs wait for room",
                "handoff",
                (f"{percent(used)} of {worker.staging_bytes_total / 2**20:.0f} MiB are in use",),
                "raise kv_transfer.send_bytes and .receive_bytes (they must fit /dev/shm)",
                used / _FULL,
            )


def _none_serves(pool: admin_pb2.PoolInfo, name: str) -> str:
    if pool.max_workers and not pool.desired and not pool.sizes_itself:
        return f"baton scale {name} 1: it is to have none"
    if pool.max_workers:
        return f"`baton why {name}`, and the log of `baton up`, say why none starts"
    return f"start one: baton worker --role {name}, or look at why none attaches"


def recoveries(status: admin_pb2.GetStatusResponse) -> Iterator[Finding]:
    if not (status.num_recoveries or status.num_workers_lost):
        return
    silent = [one for one in status.workers if one.unresponsive]
    yield Finding(
        Kind.RECOVERIES,
        "requests go on elsewhere after losing their worker",
        "recovery",
        (
            f"{status.num_recoveries} attempts were lost; {status.num_workers_lost} workers were "
            f"lost and {status.num_workers_unresponsive} did not respond",
            *(f"{one.worker_id} {one.unresponsive}" for one in silent),
        ),
        "look at the logs of the workers that were lost (memory, devices, the network)",
        2.0,
    )


def handoffs(status: admin_pb2.GetStatusResponse) -> Iterator[Finding]:
    handoffs = status.handoffs
    num_bad = handoffs.num_fallbacks + handoffs.num_failures
    num_all = handoffs.exposed.num + handoffs.num_failures
    if not num_bad or num_bad < _FELL_BACK * num_all:
        return
    yield Finding(
        Kind.HANDOFF_FALLBACKS,
        "handoffs do not go the way they should",
        "handoff",
        (
            f"of {num_all} handoffs {handoffs.num_fallbacks} fell back to another transport and "
            f"{handoffs.num_failures} never arrived (their prompts are computed again)",
            f"exposed time of those that arrived: p95 {ms(handoffs.exposed.p95_us)}",
        ),
        "`baton workers` says by which transport each pair hands over and why; the workers' logs "
        "say what failed",
        1 + num_bad / num_all,
    )
