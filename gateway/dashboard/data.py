"""The dashboard's data as plain values for JSON, with units in their names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from baton.client.doctor import stage_name, summary
from baton.client.watcher import View
from baton.runtime.durations import to_seconds
from baton.runtime.enum_names import enum_name, lane_name, role_name
from baton.runtime.ttft_target import TtftTarget
from baton.v1 import admin_pb2, cluster_pb2


def overview(view: View, requests: Iterable[admin_pb2.RequestInfo]) -> dict[str, Any]:
    """Returns all data of the page except the waterfalls of single requests.

    Args:
        view: Status of the cell, with its history.
        requests: The requests to list.
    """
    status = view.status
    return {
        "coordinator": view.address,
        "at": to_seconds(status.at),
        "window_s": to_seconds(status.window),
        "uptime_s": to_seconds(status.uptime),
        "model": status.model.name,
        "summary": "" if view.findings else summary(status),
        "findings": [asdict(one) for one in view.findings],
        "pools": [_pool(one) for one in status.pools],
        "lanes": [_lane(one) for one in status.lanes],
        "prompt_tokens": _prompt_tokens(status.prompt_tokens),
        "workers": [_worker(one) for one in status.workers],
        "history": [_sample(one) for one in status.history],
        "decisions": None
        if view.decisions is None
        else [
            {
                "at": to_seconds(one.at),
                "pool": role_name(one.role),
                "from_workers": one.from_workers,
                "to_workers": one.to_workers,
                "reason": one.reason,
            }
            for one in view.decisions
        ],
        "requests": [request(one) for one in requests],
    }


def request(info: admin_pb2.RequestInfo) -> dict[str, Any]:
    """Returns one request, with its waterfall and stalls if they are known."""
    return {
        "request_id": info.request_id,
        "state": enum_name(admin_pb2.RequestState.DESCRIPTOR, info.state),
        "lane": lane_name(info.lane),
        "tenant": info.tenant,
        "route": info.route,
        "prompt_tokens": info.prompt_tokens,
        "output_tokens": info.completion_tokens,
        "arrived_at": to_seconds(info.arrived_at),
        "age_ms": to_seconds(info.age) * 1e3,
        "error": info.error,
        "ttft_ms": info.budget.ttft_us / 1e3,
        "total_ms": info.budget.total_us / 1e3,
        "ttft_target_ms": to_seconds(info.ttft_target) * 1e3 or None,
        "itl_target_ms": to_seconds(info.itl_target) * 1e3 or None,
        "stages": [
            {
                "stage": stage_name(one.stage),
                "start_ms": one.start_us / 1e3,
                "duration_ms": one.duration_us / 1e3,
                "worker": one.worker_id,
            }
            for one in info.budget.stages
        ],
        "stalls": [
            {
                "start_ms": one.start_us / 1e3,
                "duration_ms": one.duration_us / 1e3,
                "cause": enum_name(admin_pb2.StallCause.DESCRIPTOR, one.cause),
                "worker": one.worker_id,
                "by": one.by_request_id,
                "by_tenant": one.by_tenant,
            }
            for one in info.stalls
        ],
    }


def _pool(pool: admin_pb2.PoolInfo) -> dict[str, Any]:
    return {
        "pool": role_name(pool.role),
        "serving": pool.num_serving,
        "starting": pool.num_starting,
        "draining": pool.num_draining,
        "desired": pool.desired or None,
        "running": pool.num_running,
        "waiting": pool.num_waiting,
        "kv_used": _share(pool.kv_tokens_used, pool.kv_tokens_total),
    }


def _prompt_tokens(found: admin_pb2.PromptTokens) -> dict[str, int]:
    """Returns the prompt tokens of the window by where they came from."""
    return {
        "computed": found.computed,
        "device": found.device,
        "host": found.host,
        "disk": found.disk,
        "fetched": found.fetched,
    }


def _ttft_target(targets: admin_pb2.LaneTargets) -> str | None:
    found = TtftTarget.from_ms(targets.ttft_ms, targets.ttft_ms_per_1k_tokens)
    return None if found is None else found.brief


def _lane(lane: admin_pb2.LaneStatus) -> dict[str, Any]:
    targets, ratio, itl_ms = lane.targets, lane.ttft_ratio, lane.targets.itl_ms or None
    itls_us = lane.itl.p50_us, lane.itl.p95_us, lane.itl.p99_us
    return {
        "lane": lane_name(lane.info.lane),
        "queued": lane.info.num_queued,
        "running": lane.info.num_running,
        "oldest_wait_ms": to_seconds(lane.info.oldest_wait) * 1e3,
        "admitted": lane.num_admitted,
        "ended": lane.num_ended,
        "failed": lane.num_failed,
        "output_tokens": lane.num_output_tokens,
        "sheds": dict(lane.sheds),
        "percentile": lane.targets.percentile,
        "ttft": _percentiles(lane.ttft)
        | {
            # For the chart: no single line fits a target that grows with the prompt.
            "target_ms": None if targets.ttft_ms_per_1k_tokens else targets.ttft_ms or None,
            "target": _ttft_target(targets),
            # Every request has its own target.
            "is_late": [one > 1 for one in (ratio.p50, ratio.p95, ratio.p99)],
            "attained": lane.ttft_attained if lane.HasField("ttft_attained") else None,
        },
        "itl": _percentiles(lane.itl)
        | {
            "target_ms": itl_ms,
            "target": None if itl_ms is None else f"{itl_ms} ms",
            "is_late": [itl_ms is not None and one > itl_ms * 1000 for one in itls_us],
            "attained": lane.itl_attained if lane.HasField("itl_attained") else None,
        },
        "e2e": _percentiles(lane.e2e),
        "stages": [
            {"stage": stage_name(one.stage), **_percentiles(one.times)} for one in lane.stages
        ],
    }


def _percentiles(values: admin_pb2.Percentiles) -> dict[str, Any]:
    return {
        "num": values.num,
        "p50_ms": values.p50_us / 1e3,
        "p95_ms": values.p95_us / 1e3,
        "p99_ms": values.p99_us / 1e3,
    }


def _worker(worker: admin_pb2.WorkerStatus) -> dict[str, Any]:
    state = enum_name(cluster_pb2.WorkerState.DESCRIPTOR, worker.state)
    return {
        "worker": worker.worker_id,
        "pool": role_name(worker.role),
        "state": "silent" if worker.unresponsive else state,
        "requests": worker.num_requests,
        "waiting": worker.num_waiting,
        "kv_used": _share(worker.kv_tokens_used, worker.kv_tokens_total),
        "staging_used": _share(worker.staging_bytes_used, worker.staging_bytes_total),
        "attached_s": to_seconds(worker.attached_for),
    }


def _sample(sample: admin_pb2.StatusSample) -> dict[str, Any]:
    return {
        "at": to_seconds(sample.at),
        "pools": {
            role_name(one.role): {
                "serving": one.num_serving,
                "starting": one.num_starting,
                "draining": one.num_draining,
                "kv_used": one.kv_used,
            }
            for one in sample.pools
        },
        "lanes": {
            lane_name(one.lane): {
                "queued": one.num_queued,
                "running": one.num_running,
                "ttft_p95_ms": one.ttft_p95_us / 1e3 or None,
                "itl_p95_ms": one.itl_p95_us / 1e3 or None,
            }
            for one in sample.lanes
        },
    }


def _share(used: int, total: int) -> float | None:
    return used / total if total else None
