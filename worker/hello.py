"""Describes a worker process to coordinators."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from baton.engine.base import EngineInfo
from baton.kvtransfer.transfer_client import TransferClient
from baton.v1 import cluster_pb2, common_pb2


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields of Hello in cluster.proto that depend on neither engine nor transfer service.

    Attributes:
        worker_id: Unique ID of the worker.
        incarnation: Random number of this process start.
        host_id: Equal for workers that share memory.
        startup_ms: Startup time by stage.
        labels: Labels shown to operators.
        revision: Name of model and engine arguments.
        config_digest: Hash of model and engine arguments.
    """

    worker_id: str
    incarnation: int
    host_id: str
    startup_ms: Mapping[str, int]
    labels: Mapping[str, str]
    revision: str
    config_digest: str

    def hello(
        self, role: common_pb2.Role.ValueType, info: EngineInfo, transfer: TransferClient
    ) -> cluster_pb2.Hello:
        """Returns the Hello of a worker that has just started, before its first coordinator.

        Args:
            role: Initial role.
            info: The started engine.
            transfer: Configured client of the worker's transfer service.
        """
        return cluster_pb2.Hello(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=role,
            state=cluster_pb2.WORKER_STATE_SERVING,
            model=info.model,
            fingerprint=info.layout.fingerprint(),
            capacity=cluster_pb2.Capacity(
                kv_tokens=info.kv_tokens,
                host_kv_tokens=info.host_kv_tokens,
                disk_kv_tokens=info.disk_kv_tokens,
                disk_bytes_per_s=info.disk_bytes_per_s,
                block_size_tokens=info.layout.block_size_tokens,
                max_num_seqs=info.max_num_seqs,
                max_num_batched_tokens=info.max_num_batched_tokens,
                max_send_bytes=transfer.send_bytes,
                max_receive_bytes=transfer.receive_bytes,
                supports_forced_tokens=info.supports_forced_tokens,
                keeps_prefixes=info.keeps_prefixes,
            ),
            kv_address=transfer.address,
            host_id=self.host_id,
            engine=info.engine,
            engine_version=info.version,
            device=info.device,
            device_name=info.device_name,
            pid=os.getpid(),
            startup_ms=self.startup_ms,
            labels=self.labels,
            revision=self.revision,
            config_digest=self.config_digest,
        )
