"""Measures the resources of a process and the latencies of its clients over some time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import psutil

from baton.bench.cost_client import Client, Seen
from baton.load import stats


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run, or medians of several runs.

    Attributes:
        cpu_ms_per_1000_tokens, cpu_ms_per_request, cores, resident_mb: Resources of the
            coordinator's process; 0 if there is no coordinator.
        others: Cores used by processes outside this benchmark.
    """

    tokens_per_s: float
    requests_per_s: float
    cpu_ms_per_1000_tokens: float
    cpu_ms_per_request: float
    cores: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    resident_mb: float
    others: float


class Meter:
    """Measures from its creation until `stop`.

    Args:
        client: The client; its `seen` is reset.
        coordinator: Process ID of the coordinator; None without a coordinator.
        worker: Process ID of the worker.
    """

    def __init__(self, client: Client, coordinator: int | None, worker: int) -> None:
        self._client = client
        self._coordinator = psutil.Process(coordinator) if coordinator is not None else None
        self._rest = [psutil.Process(worker), psutil.Process(os.getpid())]
        client.seen = Seen()
        self._began_at = time.perf_counter()
        self._before = self._used_s()

    def stop(self) -> Figures:
        elapsed_s = time.perf_counter() - self._began_at
        cpu_s, rest_s, all_s = (
            now - before for now, before in zip(self._used_s(), self._before, strict=True)
        )
        seen, memory_bytes = self._client.seen, 0
        if self._coordinator is not None:
            memory_bytes = self._coordinator.memory_info().rss
        return Figures(
            tokens_per_s=seen.num_tokens / elapsed_s,
            requests_per_s=seen.num_requests / elapsed_s,
            cpu_ms_per_1000_tokens=cpu_s * 1e6 / max(1, seen.num_tokens),
            cpu_ms_per_request=cpu_s * 1e3 / max(1, seen.num_requests),
            cores=cpu_s / elapsed_s,
            ttft_p50_ms=stats.percentile(seen.ttfts_s, 50) * 1e3,
            ttft_p99_ms=stats.percentile(seen.ttfts_s, 99) * 1e3,
            itl_p50_ms=stats.percentile(seen.gaps_s, 50) * 1e3,
            itl_p99_ms=stats.percentile(seen.gaps_s, 99) * 1e3,
            resident_mb=memory_bytes / 1e6,
            others=max(0.0, all_s - cpu_s - rest_s) / elapsed_s,
        )

    def _used_s(self) -> tuple[float, float, float]:
        """Returns CPU seconds of the coordinator, of worker and client, and of all processes."""
        coordinator_s = _cpu_s(self._coordinator) if self._coordinator is not None else 0.0
        times = psutil.cpu_times()
        return coordinator_s, sum(map(_cpu_s, self._rest)), sum(times) - times.idle - times.iowait


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
