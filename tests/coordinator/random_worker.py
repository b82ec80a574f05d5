"""A simulated worker process of a random cell, whose engine computes hashed outputs.

The outbox and the attempts are the production code. Failures of the engine and of handoffs happen
at random, with the probabilities in the conditions of the run.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.rpc import code_pb2

from baton.engine.base import EngineOutput, Finish
from baton.runtime.durations import to_seconds
from baton.runtime.errors import (
    BatonError,
    DeadlineExceeded,
    Internal,
    RemoteError,
    ResourceExhausted,
    Unavailable,
)
from baton.runtime.prompts.block_hashes import block_hashes, root_of
from baton.simulator.hello import hello
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from baton.worker.attempts import Attempt
from baton.worker.outbox import Outbox
from tests.coordinator.hashed_output import HashedOutput, is_last, most_tokens, text_of
from tests.coordinator.random_conditions import SHAPE

if TYPE_CHECKING:
    from tests.coordinator.random_cell import RandomCell

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
SERVING = cluster_pb2.WORKER_STATE_SERVING
DRAINING = cluster_pb2.WORKER_STATE_DRAINING
STOPPED = cluster_pb2.WORKER_STATE_STOPPED
COMMITTED = kv_transfer_pb2.HANDOFF_STATE_COMMITTED
FAILED = kv_transfer_pb2.HANDOFF_STATE_FAILED
# Refusal reasons of failed handoffs.
_REASONS = (1, 2, 3, kv_transfer_pb2.REFUSAL_REASON_CANCELLED)
_HEARTBEAT_S = 0.5


@dataclass(slots=True, eq=False)
class Held:
    """An attempt that runs on this worker.

    Attributes:
        runs: The decode has its prompt's KV cache, or computes the prompt itself.
        ready_at: Time at which the decode has computed its prompt.
        answered: The attempt has reported at least one output.
        gone: The attempt has ended on this worker.
    """

    attempt: Attempt
    output: HashedOutput
    runs: bool = False
    ready_at: float = -math.inf
    answered: bool = False
    gone: bool = False

    @property
    def spec(self) -> cluster_pb2.RequestSpec:
        return self.attempt.spec


@dataclass(eq=False)
class RandomWorker:
    """One incarnation of a worker.

    Attributes:
        launched_by: Generation of the coordinator that started the process and that the process
            must not outlive; 0 if an operator started the process.
        generation: Generation of the coordinator that welcomed the worker last.
        received: Number of commands received from that coordinator.
        stream: Stream over which the worker is attached; None while it is not attached.
        pending: Stream that the worker requested last.
        frozen_until: The process is stopped (SIGSTOP) until this time of the cell's clock.
        wedged_until: The engine makes no step until this time.
        takes_columns: The coordinator knows the handles of this worker's attempts, so that tokens
            may be reported in the column format.
        held: Running attempts by request ID.
        sends: Outgoing handoffs that are not complete.
        receives: Final state of incoming handoffs.
        blocks: Hashes of the blocks in the prefix cache.
    """

    cell: RandomCell
    key: tuple[str, int]
    role: int
    revision: str
    launched_by: int = 0
    state: int = SERVING
    dead: bool = False
    frozen_until: float = -math.inf
    wedged_until: float = -math.inf
    generation: int = 0
    received: int = 0
    stream: object | None = None
    pending: object | None = None
    takes_columns: bool = True
    rollout: cluster_pb2.RolloutRecord | None = None
    outbox: Outbox = field(default_factory=Outbox)
    held: dict[str, Held] = field(default_factory=dict)
    sends: dict[bytes, Attempt] = field(default_factory=dict)
    receives: dict[bytes, int] = field(default_factory=dict)
    blocks: dict[int, None] = field(default_factory=dict)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self._ended: deque[tuple[int, cluster_pb2.RunningRequest]] = deque(maxlen=256)
        self._delayed_actions: deque[Callable[[], None]] = deque()
        self._busy_until = self.cell.now
        self._lost_at = self.cell.now
        self._has_next_step = self._released = self._is_leaving = False
        self._send_heartbeat()

    @property
    def id(self) -> str:
        return self.key[0]

    @property
    def is_launched(self) -> bool:
        return self.launched_by != 0

    @property
    def adapters(self) -> tuple[str, ...]:
        return self.cell.conditions.adapters.get(self.revision, ())

    @property
    def address(self) -> str:
        """Address for handoffs, different for each incarnation."""
        return f"{self.id}.{self.key[1]}:1"

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Runs an action after a delay and after any SIGSTOP; a dead process runs nothing."""

        def act() -> None:
            if self._delayed_actions or self.frozen_until > self.cell.now:
                self._delayed_actions.append(action)
                if len(self._delayed_actions) == 1:
                    self.cell.at(self.frozen_until, self._resume_actions)
            elif not self.dead:
                action()

        self.cell.after(seconds, act)

    def _resume_actions(self) -> None:
        """Runs the actions that became due during the SIGSTOP, in their order."""
        if self.frozen_until > self.cell.now:
            self.cell.at(self.frozen_until, self._resume_actions)
            return
        while self._delayed_actions:
            action = self._delayed_actions.popleft()
            if not self.dead:
                action()

    # ---- The coordinator.

    def hello(self) -> cluster_pb2.Hello:
        message = hello(self.key, self.role, SHAPE, self.cell.conditions.kv_tokens)
        message.state, message.kv_address = self.state, self.address
        message.generation, message.ack = self.generation, self.received
        message.revision = message.model.revision = message.fingerprint.revision = self.revision
        for name in self.adapters:
            message.model.adapters.add(name=name, revision="x")
        conditions, capacity = self.cell.conditions, message.capacity
        capacity.keeps_prefixes = conditions.keeps_prefixes
        capacity.supports_forced_tokens = conditions.forces_tokens
        num_blocks = conditions.max_handoff_tokens // SHAPE.block_size_tokens
        capacity.max_receive_bytes = num_blocks * message.fingerprint.block_bytes
        if self.rollout is not None:
            message.rollout.CopyFrom(self.rollout)
        message.running.extend(held.attempt.running() for held in self.held.values())
        message.running.extend(one for seq, one in self._ended if self.outbox.is_kept(seq))
        return message

    def welcomed(
        self, generation: int, ack: int, role: int, adopted: frozenset[tuple[str, int]]
    ) -> None:
        """Handles a Welcome, from the same coordinator as before or from another one."""
        if generation == self.generation:
            self.outbox.resume(ack)
        else:
            self.outbox.restart(adopted)
            if self.generation:
                self._drop_all_but(adopted)
            self.generation, self.received = generation, 0
        self.role, self.takes_columns = role, True

    def lost_stream(self) -> None:
        """Handles the loss of the stream; without a coordinator for `grace_s` all requests fail."""
        self.stream, self.takes_columns = None, False
        self._lost_at = lost_at = self.cell.now
        self.after(
            self.cell.conditions.grace_s,
            lambda: self._abandon() if self.stream is None and self._lost_at == lost_at else None,
        )
        self._leave_if_idle()

    def _abandon(self) -> None:
        for held in list(self.held.values()):
            self._fail(held, Unavailable("no coordinator"))
        self.sends.clear()

    def take(self, message: cluster_pb2.CoordinatorMessage) -> None:
        """Carries out one command; a stopped worker ignores it."""
        if self.state == STOPPED:
            return
        kind = message.WhichOneof("message")
        command = getattr(message, kind)
        if kind == "prefill":
            self._start(Attempt(command.spec, PREFILL, _plan(command)))
        elif kind == "decode":
            self._start(Attempt(command.spec, DECODE, _plan(command)))
        elif kind == "send_prefix":
            # Such a worker computes what another worker would read from its cache.
            spec = cluster_pb2.RequestSpec(
                request_id=command.handoff.handoff_id.hex(),
                attempt=1,
                prompt_token_ids=[*command.prompt_token_ids, 0],
                sampling=common_pb2.SamplingParams(max_tokens=2, ignore_eos=True),
                timeout=command.timeout,
            )
            self._start(Attempt(spec, PREFILL, command.handoff))
        elif kind == "cancel":
            self._cancel(command)
        elif kind == "set_role":
            self.role = command.role
            self._post_state()
        elif kind == "drain":
            self.drain(to_seconds(command.timeout))
        elif kind == "release":
            self._released = True
            self._leave_if_idle()
        elif kind == "rollout":
            self.rollout = command
        elif kind == "step_targets":
            pass  # The duration of its steps is random.
        else:
            raise AssertionError(f"a command that this simulation does not know: {message}")

    def _cancel(self, command: cluster_pb2.CancelCommand) -> None:
        held = self.held.get(command.request_id or command.handoff_id.hex())
        if held is not None and (held.spec.attempt == command.attempt or not command.request_id):
            self._drop(held)
        if command.handoff_id:
            self.sends.pop(command.handoff_id, None)
            self._receive(command.handoff_id, FAILED)
        self._leave_if_idle()

    def post(self, **message: object) -> None:
        """Posts a message, which the outbox keeps until its acknowledgement."""
        self.outbox.post(cluster_pb2.WorkerMessage(**message))
        self.cell.network.send_up(self)

    def _post_outputs(self, *outputs: cluster_pb2.RequestOutput) -> None:
        self.post(step=cluster_pb2.StepOutputs(step=self.num_steps, outputs=outputs))

    def _post_state(self, reason: str = "", *, failed: bool = False) -> None:
        self.post(
            state_changed=cluster_pb2.WorkerStateChanged(
                state=self.state, role=self.role, reason=reason, failed=failed
            )
        )

    def _send_heartbeat(self) -> None:
        load = cluster_pb2.LoadReport(
            num_steps=self.num_steps,
            num_running=len(self.held),
            kv_tokens_total=self.cell.conditions.kv_tokens,
            kv_tokens_used=sum(
                len(one.spec.prompt_token_ids) + len(one.attempt.token_ids)
                for one in self.held.values()
                if one.attempt.role == DECODE
            ),
        )
        self.cell.network.send_load(self, load)
        self.after(_HEARTBEAT_S * self.cell.rng.uniform(0.95, 1.05), self._send_heartbeat)

    # ---- Requests.

    def _start(self, attempt: Attempt) -> None:
        spec, rng, conditions = attempt.spec, self.cell.rng, self.cell.conditions
        if spec.adapter and spec.adapter not in self.adapters:
            unknown = RemoteError(code_pb2.INVALID_ARGUMENT, f"no adapter {spec.adapter}", [])
            return self._post_outputs(attempt.failed(unknown))
        older = self.held.get(spec.request_id)
        if older is not None:
            if older.spec.attempt >= spec.attempt:
                return None
            self._drop(older)
        output = HashedOutput(
            spec.prompt_token_ids, spec.adapter, self.revision, spec.known_token_ids
        )
        held = self.held[spec.request_id] = Held(attempt, output)
        late = DeadlineExceeded("the request's deadline passed on the worker")
        self._after(to_seconds(spec.timeout), held, lambda: self._fail(held, late))
        if rng.random() < conditions.p_refused:
            refusals: list[BatonError] = [
                Internal("the engine failed this request"),
                Unavailable("the engine gave this request up"),
                ResourceExhausted("full", reason="WORKER_FULL", retry_after_s=1.0),
            ]
            refusal = rng.choice(refusals)
            self._after(0.003, held, lambda: self._fail(held, refusal))
        elif attempt.role == PREFILL:
            self._prefill(held)
        elif attempt.handoff is None:
            self._compute_prompt(held)
        elif (state := self.receives.get(attempt.handoff.handoff_id)) is not None:
            self._received(held, state)
        else:
            timeout_s = to_seconds(attempt.handoff.commit_timeout)
            self._after(timeout_s, held, lambda: self._compute_prompt(held))
        return None

    def _after(self, seconds: float, held: Held, action: Callable[[], None]) -> None:
        """Runs an action after a delay, unless the attempt has ended by then."""
        self.after(seconds, lambda: None if held.gone else action())

    def _fail(self, held: Held, error: BatonError) -> None:
        self._post_outputs(held.attempt.failed(error))
        self._drop(held)

    def _drop(self, held: Held) -> None:
        held.gone = True
        self.held.pop(held.spec.request_id, None)
        self._leave_if_idle()

    def _drop_all_but(self, adopted: frozenset[tuple[str, int]]) -> None:
        """Drops all attempts that the new coordinator did not adopt, and sends the whole cache."""
        for held in list(self.held.values()):
            if (held.spec.request_id, held.spec.attempt) not in adopted:
                self._drop(held)
            held.spec.handle = 0
        for each in (self.sends, self._ended):
            each.clear()
        if self.blocks:
            self.post(cache=cluster_pb2.CacheEvents(reset=True, stored=list(self.blocks)))

    # ---- Prefill.

    def _prefill(self, held: Held) -> None:
        """Computes a prompt after all prompts before it; cached blocks are skipped."""
        hashes = self._hashes(held)
        num_cached = 0
        while num_cached < len(hashes) and hashes[num_cached] in self.blocks:
            num_cached += 1
        num_tokens = max(1, len(held.spec.prompt_token_ids) - num_cached * SHAPE.block_size_tokens)
        began_at = max(self._busy_until, self.cell.now)
        self._busy_until = began_at + num_tokens * self.cell.conditions.token_s + 0.002
        self._after(self._busy_until - self.cell.now, held, lambda: self._prefilled(held))

    def _prefilled(self, held: Held) -> None:
        if self.wedged_until > self.cell.now:
            self._after(self.wedged_until - self.cell.now, held, lambda: self._prefilled(held))
            return
        self.num_steps += 1
        output = self._next(held)
        output.finish = output.finish or Finish.CUT
        plan = held.attempt.handoff
        if plan is not None:
            self.sends[plan.handoff_id] = held.attempt
            took_s = self.cell.rng.uniform(*self.cell.conditions.handoff_s)
            self.after(took_s, lambda: self._hand_over(plan))
        self._post_outputs(held.attempt.report(output))
        self._drop(held)

    def _hand_over(self, plan: cluster_pb2.HandoffPlan) -> None:
        attempt = self.sends.pop(plan.handoff_id, None)
        if attempt is None:
            return
        report, target = attempt.handoff_report(plan.handoff_id), self.cell.worker_at(plan.target)
        is_lost = self.cell.rng.random() < self.cell.conditions.p_handoff_fails
        if is_lost or target is None or target.receives.get(plan.handoff_id) == FAILED:
            report.state, report.reason = FAILED, self.cell.rng.choice(_REASONS)
            self.post(handoff=report)
        else:
            report.state = COMMITTED
            self.post(handoff=report)
            target._receive(plan.handoff_id, COMMITTED)
        self._leave_if_idle()

    def _cache(self, held: Held) -> None:
        """Adds the prompt's blocks to the prefix cache, and reports the new ones."""
        new = [block for block in self._hashes(held) if block not in self.blocks]
        self.blocks.update(dict.fromkeys(new))
        if new:
            self.post(cache=cluster_pb2.CacheEvents(stored=new))

    def _hashes(self, held: Held) -> list[int]:
        root = root_of(held.spec.adapter)
        return list(block_hashes(held.spec.prompt_token_ids, SHAPE.block_size_tokens, root))

    # ---- Decode.

    def _receive(self, handoff_id: bytes, state: int) -> None:
        """Records that an incoming handoff was committed or has failed."""
        self.receives[handoff_id] = state
        for held in list(self.held.values()):
            plan = held.attempt.handoff
            if held.attempt.role == DECODE and plan is not None and plan.handoff_id == handoff_id:
                self._received(held, state)

    def _received(self, held: Held, state: int) -> None:
        if state == FAILED:
            # The engine notices a failed handoff in its next step.
            self._after(self.cell.conditions.step_s, held, lambda: self._compute_prompt(held))
        elif held.runs:
            return
        elif (
            held.attempt.handoff.skip_tokens
            and self.cell.rng.random() < self.cell.conditions.p_prefix_gone
        ):
            self._post_outputs(held.attempt.report(EngineOutput("", finish=Finish.PREFIX_GONE)))
            self._drop(held)
        else:
            held.runs = True
            self._schedule_step()

    def _compute_prompt(self, held: Held) -> None:
        """Computes the prompt on this decode worker, because there is no handoff or it failed."""
        if not held.runs:
            held.runs = True
            num_tokens = len(held.spec.prompt_token_ids)
            held.ready_at = self.cell.now + num_tokens * self.cell.conditions.token_s
            self._schedule_step()

    def _schedule_step(self) -> None:
        if not self._has_next_step:
            self._has_next_step = True
            self.after(self.cell.conditions.step_s, self._step)

    def _step(self) -> None:
        """Runs one decode step: every running output grows by one token."""
        if self.wedged_until > self.cell.now:
            self.after(self.wedged_until - self.cell.now, self._step)
            return
        self.num_steps += 1
        step = cluster_pb2.StepOutputs(step=self.num_steps)
        for held in [one for one in self.held.values() if one.runs]:
            if held.ready_at > self.cell.now:
                continue
            if self.cell.rng.random() < self.cell.conditions.p_gives_up:
                step.outputs.append(held.attempt.failed(Unavailable("gave the request up")))
                self._drop(held)
                continue
            output = self._next(held)
            if self.takes_columns and held.attempt.report_token(output, step.tokens):
                continue
            message = held.attempt.report(output)
            step.outputs.append(message)
            if output.finish is not None:
                ended = held.attempt.running()
                ended.finished.CopyFrom(message.finished)
                self._ended.append((self.outbox.next_seq, ended))
                self._drop(held)
        if step.outputs or step.tokens.handles:
            self.post(step=step)
        self._has_next_step = any(held.runs for held in self.held.values())
        if self._has_next_step:
            self.after(self.cell.conditions.step_s, self._step)

    def _next(self, held: Held) -> EngineOutput:
        """Computes the next token; the first output of an attempt also carries its timings."""
        token, sampling = held.output.next(), held.spec.sampling
        output = EngineOutput("", token_ids=[token], text=text_of(token))
        if is_last(token) and not sampling.ignore_eos:
            output.finish = Finish.STOP
        elif len(held.attempt.token_ids) + 1 >= most_tokens(sampling):
            output.finish = Finish.LENGTH
        if not held.answered:
            self._cache(held)
            held.answered = True
            output.timings = cluster_pb2.StageTimings(queue_us=1_000, run_us=2_000)
        return output

    # ---- Draining and exit.

    def drain(self, timeout_s: float) -> None:
        """Starts to drain: the worker stops when it is idle and released, or after `timeout_s`."""
        if self.state == SERVING:
            self.state = DRAINING
            self._post_state("drain")
            self.after(timeout_s, self._leave)
            self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        is_released = self._released or self.stream is None
        is_idle = not (self.held or self.sends)
        if self.state == DRAINING and is_released and is_idle:
            self._leave()

    def _leave(self) -> None:
        if not self._is_leaving:
            self._is_leaving, self.state = True, STOPPED
            self._post_state("stopped")
            self._drop_all_but(frozenset())
            self.after(0.05, lambda: self.cell.exit(self, "exited"))


def _plan(
    command: cluster_pb2.PrefillCommand | cluster_pb2.DecodeCommand,
) -> cluster_pb2.HandoffPlan | None:
    """Returns the handoff plan of a PrefillCommand or DecodeCommand, if it has one."""
    return command.handoff if command.HasField("handoff") else None
