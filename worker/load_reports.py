"""Makes the worker's load reports, which also update its metrics."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from baton.engine.base import Engine, TierLoads
from baton.kvtransfer.errors import ServiceGone
from baton.kvtransfer.transfer_client import TransferClient
from baton.v1 import cluster_pb2, kv_transfer_pb2
from baton.worker.handoffs import HandoffLog
from baton.worker.metrics import Snapshot, WorkerCollector
from baton.worker.runner import Runner
from baton.worker.tier_reports import TierReports


class LoadReports:
    """Makes one load report after the other.

    Args:
        engine: Started engine.
        transfer: Client of the worker's transfer service.
        runner: Owner of the worker's requests.
        tiers: Reports of the worker's KV blocks.
        handoffs: Results of the handoffs so far.
        collector: Gets the snapshot for the metrics.
        is_profiling: Whether a profile is recorded, which makes the engine's steps slower.
    """

    def __init__(
        self,
        engine: Engine,
        transfer: TransferClient,
        runner: Runner,
        tiers: TierReports,
        handoffs: HandoffLog,
        collector: WorkerCollector,
        is_profiling: Callable[[], bool],
    ) -> None:
        self._engine, self._transfer = engine, transfer
        self._runner, self._tiers = runner, tiers
        self._handoffs, self._collector, self._is_profiling = handoffs, collector, is_profiling
        self._process = psutil.Process()

    async def make(self) -> cluster_pb2.LoadReport:
        """Makes a report, and updates the metrics snapshot and the coordinator's cache record.

        If the transfer service has ended, its last known values are used. The runner reports the
        end itself, after it has failed all requests on the same stream.
        """
        self._tiers.flush()
        load = self._engine.take_load()
        # Steps take longer under the profiler, so the latency model must not learn from them.
        samples = load.samples if not self._is_profiling() else ()
        try:
            transfer = await self._transfer.stats()
        except ServiceGone:
            transfer = self._collector.snapshot.transfer
        staging_used, staging_total = _fuller_staging(transfer)
        report = cluster_pb2.LoadReport(
            num_steps=load.num_steps,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_tokens_used=load.kv_tokens_used,
            kv_tokens_total=load.kv_tokens_total,
            staging_bytes_used=staging_used,
            staging_bytes_total=staging_total,
            steps=[
                cluster_pb2.StepSample(
                    num_prefill_tokens=sample.num_prefill_tokens,
                    num_decodes=sample.num_decodes,
                    num_kv_tokens=sample.num_kv_tokens,
                    duration_us=round(sample.duration_s * 1e6),
                    prefill_token_squares=sample.prefill_token_squares,
                )
                for sample in samples
            ],
            prefill_tokens_waiting=load.prefill_tokens_waiting,
            num_handoffs=transfer.num_sends + transfer.num_receives,
            resident_bytes=self._process.memory_info().rss,
            peers=transfer.peers,
            host_loads=_tier_loads(load.host_loads),
            disk_loads=_tier_loads(load.disk_loads),
        )
        self._collector.snapshot = Snapshot(
            report,
            transfer,
            self._runner.counts(),
            self._tiers.counts(),
            self._handoffs.counts(),
        )
        return report


def _fuller_staging(transfer: kv_transfer_pb2.LocalStatistics) -> tuple[int, int]:
    """Used bytes and size of the fuller of the two parts of staging, for sending and receiving.

    A worker that only sends or only receives fills one part, and handoffs wait for that part.
    """
    sending = transfer.send_bytes_used, transfer.send_bytes_total
    receiving = transfer.receive_bytes_used, transfer.receive_bytes_total
    return max(sending, receiving, key=lambda part: part[0] / (part[1] or 1))


def _tier_loads(loads: TierLoads) -> cluster_pb2.TierLoads:
    return cluster_pb2.TierLoads(num_bytes=loads.num_bytes, duration_us=round(loads.seconds * 1e6))
