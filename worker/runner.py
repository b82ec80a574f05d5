"""Runs the requests of a worker, from command to outputs."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from google.rpc import code_pb2

from baton.engine.base import (
    Engine,
    EngineDead,
    EngineOutput,
    Finish,
    RequestRejected,
)
from baton.kvtransfer.layout import KvLayout
from baton.kvtransfer.transfer_client import HandoffEvent, TransferClient
from baton.runtime.durations import to_seconds
from baton.runtime.errors import (
    BatonError,
    DeadlineExceeded,
    Internal,
    RemoteError,
    ResourceExhausted,
)
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from baton.worker.attempts import Attempt
from baton.worker.decode_role import DecodeRole
from baton.worker.handoffs import RECEIVE, SEND, HandoffLog
from baton.worker.metrics import RunnerCounts
from baton.worker.outbox import Outbox
from baton.worker.own_blocks import OwnBlocks
from baton.worker.prefill_role import PrefillRole
from baton.worker.prefix_sends import PrefixSends
from baton.worker.receives import Receives
from baton.worker.sends import Sends
from baton.worker.tier_reports import TierReports

_log = logging.getLogger(__name__)

# Size limit of the running requests in a Hello, which is one message.
_MAX_RUNNING_BYTES = 8 * 2**20
# Number of finished requests kept for a Hello while their end is not acknowledged.
_MAX_ENDED = 256


class RolePolicy(Protocol):
    """Behaviour of a role; prefill_role.py and decode_role.py implement it."""

    async def begin(self, attempt: Attempt) -> None: ...
    def on_output(self, attempt: Attempt, output: EngineOutput) -> None: ...
    def release(self, attempt: Attempt) -> None: ...


@dataclass(slots=True, eq=False)
class _Held:
    """An attempt that this worker runs.

    Attributes:
        attempt: The attempt.
        policy: Behaviour of the role whose command started the attempt.
        begin: Task that submits the attempt to the engine.
        deadline: Timer of the request's deadline; None: no deadline.
    """

    attempt: Attempt
    policy: RolePolicy
    begin: asyncio.Task[None] | None = None
    deadline: asyncio.TimerHandle | None = None


class Runner:
    """Owns every request of this worker.

    All methods are called from one event loop. Commands of both roles are executed, so that a
    worker that changes its role can finish its requests.

    Args:
        engine: Started engine.
        layout: Layout of the engine's KV cache.
        transfer: Configured client of the transfer service.
        outbox: Queue for outputs and reports.
        tiers: Reports of the worker's KV blocks.
        handoffs: Receives the result of each handoff.
        max_requests: Limit of requests held at once, including those being cleaned up; further ones
            are refused.
        open_timeout_s: Longest wait for a handoff's reservation.

    Attributes:
        idle: Event that is set while no request, cleanup or handoff is left.
        died: Resolves to the reason when the engine has failed.
    """

    def __init__(
        self,
        engine: Engine,
        layout: KvLayout,
        transfer: TransferClient,
        outbox: Outbox,
        tiers: TierReports,
        handoffs: HandoffLog,
        *,
        max_requests: int,
        open_timeout_s: float,
    ) -> None:
        self._engine, self._outbox, self._max_requests = engine, outbox, max_requests
        self._transfer, self._tiers, self._handoffs = transfer, tiers, handoffs
        self._own_blocks = OwnBlocks(engine)
        self.idle = asyncio.Event()
        self.idle.set()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._sends = Sends(
            transfer,
            layout,
            open_timeout_s=open_timeout_s,
            report=partial(self._report_handoff, SEND),
            on_change=self._update_idle,
        )
        self._receives = Receives(
            transfer,
            report=partial(self._report_handoff, RECEIVE),
            on_change=self._update_idle,
        )
        self._prefill = PrefillRole(engine, self._sends)
        self._decode = DecodeRole(engine, self._receives)
        self._prefix_sends = PrefixSends(
            engine,
            self._sends,
            layout.block_size_tokens,
            on_end=self._update_idle,
            on_engine_dead=self._die,
        )
        self._held: dict[str, _Held] = {}
        self._by_engine_request_id: dict[str, _Held] = {}
        self._cleanups: dict[asyncio.Task[None], _Held] = {}
        self._num_steps = 0
        # Finished outputs, each with the sequence number of the message that reports its end.
        self._ended: deque[tuple[int, cluster_pb2.RunningRequest]] = deque(maxlen=_MAX_ENDED)
        # Outputs use the handles of requests only while the coordinator that gave them is attached.
        self._uses_handles = True
        # Counts since the start; see RunnerCounts.
        self._num_tokens = self._num_handoff_tokens = 0
        self._num_ended: Counter[str] = Counter()

    def counts(self) -> RunnerCounts:
        """The current counts."""
        num_ended = dict(self._num_ended + self._prefix_sends.num_ended)
        return RunnerCounts(self._num_tokens, num_ended, self._num_handoff_tokens)

    def running(self) -> list[cluster_pb2.RunningRequest]:
        """Running requests, and finished ones whose end is unacknowledged, for adoption in a Hello.

        Requests that do not fit into a message are left out and start again on another worker.
        """
        every = [held.attempt.running() for held in self._held.values()]
        every += [ended for seq, ended in self._ended if self._outbox.is_kept(seq)]
        sums = itertools.accumulate(one.ByteSize() for one in every)
        return [
            one
            for one, num_bytes in zip(every, sums, strict=True)
            if num_bytes <= _MAX_RUNNING_BYTES
        ]

    async def run(self) -> None:
        """Forwards the engine's outputs and the events of handoffs until cancelled.

        Raises:
            ExceptionGroup: Contains EngineDead or ServiceGone.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump_engine())
            group.create_task(self._pump_transfer())

    # ---- Commands.

    def attached(self) -> None:
        """Lets outputs use handles: the coordinator that gives them is attached."""
        self._uses_handles = True

    def detached(self) -> None:
        """Sends outputs without handles: the next stream may be to another coordinator."""
        self._uses_handles = False

    def limit(self, max_requests: int) -> None:
        """Sets the limit of requests held at once; requests over the limit are kept."""
        self._max_requests = max_requests

    def start_prefill(self, command: cluster_pb2.PrefillCommand) -> None:
        role, plan = common_pb2.ROLE_PREFILL, _handoff(command)
        self._start(Attempt(command.spec, role, plan, _fetch(command)), self._prefill)

    def start_decode(self, command: cluster_pb2.DecodeCommand) -> None:
        role, plan = common_pb2.ROLE_DECODE, _handoff(command)
        self._start(Attempt(command.spec, role, plan, _fetch(command)), self._decode)

    def send_prefix(self, command: cluster_pb2.SendPrefixCommand) -> None:
        """Sends a cached prefix of a prompt to another worker."""
        if self._is_full:
            self._prefix_sends.refuse(command)
        else:
            self.idle.clear()
            self._prefix_sends.start(command)

    def cancel(self, command: cluster_pb2.CancelCommand) -> None:
        """Ends an attempt in any state without an output, and drops its handoff."""
        if not command.attempt:
            if self._sends.knows(command.handoff_id):
                self._prefix_sends.cancel(command.handoff_id)
            else:
                self._receives.drop(command.handoff_id)
            return
        held = self._held.get(command.request_id)
        if held is not None and held.attempt.spec.attempt == command.attempt:
            self._drop(held, "cancelled")
        if command.handoff_id and command.handoff_id not in self._held_handoffs():
            if self._sends.knows(command.handoff_id):
                self._sends.abort(command.handoff_id)
            else:
                self._receives.drop(command.handoff_id)

    def keep_only(self, adopted: frozenset[tuple[str, int]]) -> None:
        """Ends all attempts except these (request id, attempt), for a new coordinator.

        It also ends handoffs without a request, as a coordinator that has just started knows of no
        fetches, and reports all cached blocks.
        """
        for held in list(self._held.values()):
            if (held.attempt.spec.request_id, held.attempt.spec.attempt) not in adopted:
                self._drop(held, "cancelled")
            # The handles belong to the old coordinator.
            held.attempt.spec.handle = 0
        self._drop_unowned_handoffs()
        self._ended.clear()
        self._tiers.report_all()

    def fail_all(self, error: BatonError) -> None:
        """Fails every request with an error."""
        outputs = [held.attempt.failed(error) for held in self._held.values()]
        for held in list(self._held.values()):
            self._drop(held, "failed")
        self._post(outputs)
        self._drop_unowned_handoffs()

    async def settle(self, timeout_s: float) -> None:
        """Waits until dropped requests are freed, for at most `timeout_s`."""
        if tasks := [*self._cleanups, *self._prefix_sends.tasks()]:
            await asyncio.wait(tasks, timeout=timeout_s)

    def _held_handoffs(self) -> set[bytes]:
        """Handoffs of current requests and of requests being freed, which release theirs later."""
        every = [*self._held.values(), *self._cleanups.values()]
        plans = [plan for held in every for plan in (held.attempt.handoff, held.attempt.fetch)]
        return {plan.handoff_id for plan in plans if plan is not None}

    @property
    def _is_full(self) -> bool:
        num_held = len(self._held) + len(self._cleanups) + len(self._prefix_sends)
        return num_held >= self._max_requests

    def _drop_unowned_handoffs(self) -> None:
        self._prefix_sends.cancel_all()
        kept = self._held_handoffs()
        # The engine may still write the staging of the prefixes.
        self._sends.abort_all_but(kept | self._prefix_sends.handoff_ids)
        self._receives.keep_only(kept)

    # ---- One request.

    def _start(self, attempt: Attempt, policy: RolePolicy) -> None:
        """Starts an attempt, and drops an older attempt of the same request."""
        older = self._held.get(attempt.spec.request_id)
        if older is not None:
            if older.attempt.spec.attempt >= attempt.spec.attempt:
                return
            self._drop(older, "superseded")
        if self._is_full:
            refusal = ResourceExhausted(
                f"this worker is at its limit of {self._max_requests} requests",
                reason="WORKER_FULL",
                retry_after_s=1.0,
            )
            self._post([attempt.failed(refusal)])
            policy.release(attempt)
            if attempt.fetch is not None and attempt.fetch.num_tokens:
                # Its first tokens may be in this worker's staging already.
                self._receives.drop(attempt.fetch.handoff_id)
            return
        held = _Held(attempt, policy)
        self._held[attempt.spec.request_id] = held
        self._by_engine_request_id[attempt.engine_request_id] = held
        if attempt.fetch is not None and attempt.fetch.num_tokens:
            self._receives.expect(attempt.fetch.handoff_id, attempt)
        self.idle.clear()
        if attempt.spec.HasField("timeout"):
            held.deadline = asyncio.get_running_loop().call_later(
                to_seconds(attempt.spec.timeout), self._expire, held
            )
        held.begin = asyncio.create_task(
            self._begin(held), name=f"begin {attempt.engine_request_id}"
        )

    async def _begin(self, held: _Held) -> None:
        try:
            await self._own_blocks.load(held.attempt)
            await held.policy.begin(held.attempt)
        except RequestRejected as error:
            self._fail(held, RemoteError(code_pb2.INVALID_ARGUMENT, str(error), []))
        except EngineDead as error:
            self._die(str(error))
        except Exception as error:
            _log.exception("request %s could not be started", held.attempt.engine_request_id)
            self._fail(held, Internal(f"{type(error).__name__}: {error}"))

    def _expire(self, held: _Held) -> None:
        self._fail(held, DeadlineExceeded("the request's deadline passed on the worker"))

    def _fail(self, held: _Held, error: BatonError) -> None:
        if self._by_engine_request_id.get(held.attempt.engine_request_id) is not held:
            # The attempt was dropped, and its `begin` task failed before its cancellation.
            return
        self._post([held.attempt.failed(error)])
        self._drop(held, "failed")

    def _drop(self, held: _Held, how: str) -> None:
        """Removes a request at once; its engine part and handoff are freed in the background."""
        self._forget(held, how)
        self._free_later(held)

    def _free_later(self, held: _Held) -> None:
        task = asyncio.create_task(self._free(held), name=f"free {held.attempt.engine_request_id}")
        self._cleanups[task] = held
        task.add_done_callback(self._freed)

    def _freed(self, task: asyncio.Task[None]) -> None:
        del self._cleanups[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(f"freeing a request failed: {error!r}")
        self._update_idle()

    async def _free(self, held: _Held) -> None:
        try:
            if held.begin is not None:
                held.begin.cancel()
                await asyncio.wait([held.begin])
            await self._engine.abort([held.attempt.engine_request_id])
        except EngineDead as error:
            self._die(str(error))
        finally:
            held.policy.release(held.attempt)
            self._release_fetch(held.attempt)

    def _release_fetch(self, attempt: Attempt, *, is_loaded: bool = False) -> None:
        """Drops the prefix that an attempt fetches, even if it arrives later. Idempotent."""
        plan = attempt.fetch
        if plan is not None and self._receives.expects(plan.handoff_id, attempt):
            self._receives.release(plan.handoff_id, is_loaded=is_loaded)

    def _forget(self, held: _Held, how: str) -> None:
        del self._held[held.attempt.spec.request_id]
        del self._by_engine_request_id[held.attempt.engine_request_id]
        if held.deadline is not None:
            held.deadline.cancel()
        self._num_ended[how] += 1
        self._update_idle()

    # ---- Events of the engine and the transfer service.

    async def _pump_engine(self) -> None:
        while True:
            step = await self._engine.next_step()
            self._num_steps += 1
            self._tiers.take(step)
            # Cache changes are sent before the outputs that depend on them: stored blocks before
            # the prompt's first token, removed blocks before the request that misses them.
            if any(
                output.timings is not None or output.finish is Finish.PREFIX_GONE
                for output in step.outputs
            ):
                self._tiers.flush()
            message = cluster_pb2.StepOutputs(step=self._num_steps)
            for output in step.outputs:
                held = self._by_engine_request_id.get(output.engine_request_id)
                if held is None:
                    self._own_blocks.take(output)
                    self._prefix_sends.take(output)
                    continue
                self._take(held, output, message)
                if message.outputs and message.outputs[-1].finished.prompt_logprobs:
                    # They are up to 4 MiB; those of several requests would exceed gRPC's limit.
                    self._outbox.post(cluster_pb2.WorkerMessage(step=message))
                    message = cluster_pb2.StepOutputs(step=self._num_steps)
            if message.outputs or message.HasField("tokens"):
                self._outbox.post(cluster_pb2.WorkerMessage(step=message))
            await self._outbox.wait_for_space()

    def _take(self, held: _Held, output: EngineOutput, step: cluster_pb2.StepOutputs) -> None:
        self._num_tokens += len(output.token_ids)
        self._num_handoff_tokens += output.num_handoff_tokens
        num_host_tokens = output.num_host_tokens
        if output.timings is not None:
            num_host_tokens += held.attempt.num_own_host_tokens
        self._tiers.count_loads(num_host_tokens, output.num_disk_tokens)
        if self._uses_handles and held.attempt.report_token(output, step.tokens):
            held.policy.on_output(held.attempt, output)
            return
        message = held.attempt.report(output)
        held.policy.on_output(held.attempt, output)
        if output.has_begun:
            self._release_fetch(held.attempt, is_loaded=output.num_handoff_tokens > 0)
        step.outputs.append(message)
        if end := message.WhichOneof("end"):
            if end == "finished" and held.attempt.role == common_pb2.ROLE_DECODE:
                ended = held.attempt.running()
                ended.finished.CopyFrom(message.finished)
                # The outputs of this step go into the message that is posted next.
                self._ended.append((self._outbox.next_seq, ended))
            self._forget(held, end)

    async def _pump_transfer(self) -> None:
        while True:
            for event in await self._transfer.next_events():
                self._on_handoff_event(event)

    def _on_handoff_event(self, event: HandoffEvent) -> None:
        if isinstance(event, kv_transfer_pb2.LocalSendState):
            self._sends.on_send_state(event)
        else:
            self._receives.on_handoff_state(event)

    def _report_handoff(
        self, direction: str, traceparent: str, report: cluster_pb2.HandoffReport
    ) -> None:
        self._handoffs.record(direction, traceparent, report)
        self._outbox.post(cluster_pb2.WorkerMessage(handoff=report))

    def _post(self, outputs: Sequence[cluster_pb2.RequestOutput]) -> None:
        if outputs:
            step = cluster_pb2.StepOutputs(step=self._num_steps, outputs=outputs)
            self._outbox.post(cluster_pb2.WorkerMessage(step=step))

    def _die(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(reason)

    def _update_idle(self) -> None:
        requests = self._held or self._cleanups or self._prefix_sends
        if requests or self._sends.num_live or self._receives.num_live:
            self.idle.clear()
        else:
            self.idle.set()


def _handoff(
    command: cluster_pb2.PrefillCommand | cluster_pb2.DecodeCommand,
) -> cluster_pb2.HandoffPlan | None:
    return command.handoff if command.HasField("handoff") else None


def _fetch(
    command: cluster_pb2.PrefillCommand | cluster_pb2.DecodeCommand,
) -> cluster_pb2.FetchPlan | None:
    return command.fetch if command.HasField("fetch") else None
