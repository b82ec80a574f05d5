"""Connects a worker's parts (engine, transfer service, requests) with the attach stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, NamedTuple

from baton.engine.base import Engine
from baton.runtime.durations import to_seconds
from baton.runtime.enum_names import role_name
from baton.runtime.errors import Unavailable
from baton.runtime.steps.step_messages import from_message
from baton.v1 import cluster_pb2, common_pb2
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


class WorkerHost:
    """Represents the worker on the attach stream (worker/attach.py).

    Args:
        hello: The worker as it has just started.
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
        hello: cluster_pb2.Hello,
        *,
        engine: Engine,
        runner: Runner,
        outbox: Outbox,
        collector: WorkerCollector,
        profiles: Profiles,
        handlers: Mapping[str, Callable[[Any], None]],
        max_requests: Mapping[common_pb2.Role.ValueType, int],
    ) -> None:
        # The worker as it is now, without its requests.
        self._hello, self._max_requests = hello, max_requests
        self._engine, self._runner, self._outbox = engine, runner, outbox
        self._collector, self._profiles = collector, profiles
        self._handlers: dict[str, Callable[[Any], None]] = {
            **handlers,
            "set_role": self._set_role,
            "drain": self._order_drain,
            "release": self._release,
            "rollout": self._keep_rollout,
            "step_targets": self.on_step_targets,
        }
        self.attached, self.released = asyncio.Event(), asyncio.Event()
        self.drain: DrainOrder | None = None
        self.drain_ordered = asyncio.Event()

    def change_state(
        self, state: cluster_pb2.WorkerState.ValueType, reason: str, *, failed: bool = False
    ) -> None:
        """Changes the state and reports it to the coordinator, now or in the next Hello."""
        self._hello.state = state
        self._report_state(reason, failed=failed)

    # ---- Events of the attach stream.

    def hello(self) -> cluster_pb2.Hello:
        """Describes this worker and its requests; the attachment adds generation and ack."""
        hello = cluster_pb2.Hello(running=self._runner.running())
        hello.MergeFrom(self._hello)
        return hello

    def on_command(self, message: cluster_pb2.CoordinatorMessage) -> None:
        """Executes or starts a command; called once per command."""
        kind = message.WhichOneof("message")
        if kind is not None and (handle := self._handlers.get(kind)) is not None:
            handle(getattr(message, kind))
        else:
            # It comes from a newer coordinator, which sees that the command had no effect.
            _log.warning("unknown command %s", kind)

    def on_welcome(self, role: common_pb2.Role.ValueType) -> None:
        """Called when the worker is attached in this role."""
        if role != common_pb2.ROLE_UNSPECIFIED:
            self._serve(role)
        self._runner.attached()
        self.attached.set()

    def on_step_targets(self, targets: cluster_pb2.StepTargets) -> None:
        """Applies the targets of the engine's steps, which may be the current ones."""
        self._engine.set_step_targets(from_message(targets))

    def on_detached(self) -> None:
        """Called when the stream has ended; the next one may be to another coordinator."""
        self._runner.detached()

    def keep_only(self, adopted: frozenset[tuple[str, int]]) -> None:
        """Ends all attempts except these (request id, attempt), for a new coordinator."""
        self._runner.keep_only(adopted)
        self._profiles.cancel()

    def abandon(self, reason: str) -> None:
        """Fails all requests, because the coordinator was away for longer than the grace time."""
        self._runner.fail_all(Unavailable(reason))

    # ---- Commands.

    def _set_role(self, command: cluster_pb2.SetRoleCommand) -> None:
        # The engine executes commands of both roles, so nothing else changes.
        self._serve(command.role)
        self._report_state("the coordinator set the role")

    def _order_drain(self, command: cluster_pb2.DrainCommand) -> None:
        self.drain = DrainOrder(monotonic() + to_seconds(command.timeout), command.reason)
        self.drain_ordered.set()

    def _release(self, _: cluster_pb2.ReleaseCommand) -> None:
        self.released.set()

    def _keep_rollout(self, record: cluster_pb2.RolloutRecord) -> None:
        # Hello repeats it, so that a restarted coordinator recovers the rollout.
        self._hello.rollout.CopyFrom(record)

    def _serve(self, role: common_pb2.Role.ValueType) -> None:
        if role not in self._max_requests:
            # It comes from a newer coordinator, which sees that the command had no effect.
            _log.warning("unknown role %s", role)
            return
        self._hello.role = role
        self._runner.limit(self._max_requests[role])
        self._collector.serves(role_name(role))

    def _report_state(self, reason: str, *, failed: bool = False) -> None:
        change = cluster_pb2.WorkerStateChanged(
            state=self._hello.state, role=self._hello.role, reason=reason, failed=failed
        )
        self._outbox.post(cluster_pb2.WorkerMessage(state_changed=change))
