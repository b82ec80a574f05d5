"""Connects a worker's parts (engine, transfer service, requests) with the attach stream."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, NamedTuple

from baton.engine.base import Engine, EngineInfo
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime.durations import to_seconds
from baton.runtime.enum_names import role_name
from baton.runtime.errors import Unavailable
from baton.runtime.step_messages import from_message
from baton.v1 import cluster_pb2, common_pb2
from baton.worker.load_reports import LoadReports
from baton.worker.metrics import WorkerCollector
from baton.worker.outbox import Outbox
from baton.worker.profiles import Profiles
from baton.worker.runner import Runner

_log = logging.getLogger(__name__)


class DrainOrder(NamedTuple):
    """A drain command of the coordinator.

    Attributes:
        deadline: Time by time.monotonic until which requests may run.
        reason: Reason for people.
    """

    deadline: float
    reason: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Describes a worker process to coordinators; see Hello in cluster.proto.

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


class WorkerHost:
    """Represents the worker on the attach stream (the `Host` of worker/attach.py).

    Args:
        identity: The worker process.
        role: Initial role; the coordinator may change it.
        handlers: Commands that other parts execute, by field name of CoordinatorMessage.
        max_requests: Largest number of requests held at once, by role.

    Attributes:
        attached: Event that is set when a coordinator has welcomed this worker.
        drain: The coordinator's latest order to drain; None before the first.
        drain_ordered: Event that each drain command sets.
        released: Event that is set when this draining worker will get no more work.
    """

    def __init__(
        self,
        identity: Identity,
        role: common_pb2.Role.ValueType,
        *,
        engine: Engine,
        info: EngineInfo,
        transfer: TransferClient,
        runner: Runner,
        outbox: Outbox,
        collector: WorkerCollector,
        profiles: Profiles,
        load_reports: LoadReports,
        handlers: Mapping[str, Callable[[Any], None]],
        max_requests: Mapping[common_pb2.Role.ValueType, int],
    ) -> None:
        self._identity, self._max_requests = identity, max_requests
        self._engine, self._info, self._transfer = engine, info, transfer
        self._runner, self._outbox, self._collector = runner, outbox, collector
        self._profiles, self._load_reports, self._handlers = profiles, load_reports, handlers
        # Hello repeats this record, so that a restarted coordinator recovers the rollout.
        self._rollout: cluster_pb2.RolloutRecord | None = None
        self._role, self._state = role, cluster_pb2.WORKER_STATE_SERVING
        self.attached, self.released = asyncio.Event(), asyncio.Event()
        self.drain: DrainOrder | None = None
        self.drain_ordered = asyncio.Event()

    def change_state(
        self, state: cluster_pb2.WorkerState.ValueType, reason: str, *, failed: bool = False
    ) -> None:
        """Changes the state and reports it to the coordinator, now or in the next Hello."""
        self._state = state
        self._report_state(reason, failed=failed)

    # ---- worker/attach.py's Host.

    def hello(self) -> cluster_pb2.Hello:
        identity, info = self._identity, self._info
        return cluster_pb2.Hello(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            role=self._role,
            state=self._state,
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
                max_send_bytes=self._transfer.send_bytes,
                max_receive_bytes=self._transfer.receive_bytes,
                supports_forced_tokens=info.supports_forced_tokens,
                keeps_prefixes=info.keeps_prefixes,
            ),
            kv_address=self._transfer.address,
            host_id=identity.host_id,
            engine=info.engine,
            engine_version=info.version,
            device=info.device,
            device_name=info.device_name,
            running=self._runner.running(),
            pid=os.getpid(),
            startup_ms=identity.startup_ms,
            labels=identity.labels,
            revision=identity.revision,
            config_digest=identity.config_digest,
            rollout=self._rollout,
        )

    async def load_report(self) -> cluster_pb2.LoadReport:
        return await self._load_reports.make()

    def on_command(self, message: cluster_pb2.CoordinatorMessage) -> None:
        match message.WhichOneof("message"):
            case str(kind) if kind in self._handlers:
                self._handlers[kind](getattr(message, kind))
            case "set_role":
                # The engine executes commands of both roles, so nothing else changes.
                self._serve(message.set_role.role)
                self._report_state("the coordinator set the role")
            case "drain":
                timeout_s = to_seconds(message.drain.timeout)
                self.drain = DrainOrder(monotonic() + timeout_s, message.drain.reason)
                self.drain_ordered.set()
            case "release":
                self.released.set()
            case "rollout":
                self._rollout = message.rollout
            case "step_targets":
                self.on_step_targets(message.step_targets)
            case kind:
                # It comes from a newer coordinator, which sees that the command had no effect.
                _log.warning("unknown command %s", kind)

    def on_welcome(self, role: common_pb2.Role.ValueType) -> None:
        if role != common_pb2.ROLE_UNSPECIFIED:
            self._serve(role)
        self._runner.attached()
        self.attached.set()

    def on_step_targets(self, targets: cluster_pb2.StepTargets) -> None:
        self._engine.set_step_targets(from_message(targets))

    def on_detached(self) -> None:
        self._runner.detached()

    def keep_only(self, adopted: frozenset[tuple[str, int]]) -> None:
        self._runner.keep_only(adopted)
        self._profiles.cancel()

    def abandon(self, reason: str) -> None:
        self._runner.fail_all(Unavailable(reason))

    def _serve(self, role: common_pb2.Role.ValueType) -> None:
        if role not in self._max_requests:
            # It comes from a newer coordinator, which sees that the command had no effect.
            _log.warning("unknown role %s", role)
            return
        self._role = role
        self._runner.limit(self._max_requests[role])
        self._collector.serves(role_name(role))

    def _report_state(self, reason: str, *, failed: bool = False) -> None:
        change = cluster_pb2.WorkerStateChanged(
            state=self._state, role=self._role, reason=reason, failed=failed
        )
        self._outbox.post(cluster_pb2.WorkerMessage(state_changed=change))
