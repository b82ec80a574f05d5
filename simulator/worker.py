"""A simulated worker that simulates consecutive steps with the same batch as one event.

Such a run of steps ends when a request joins or ends, when the KV cache is full, when there is a
prompt to compute, or when tokens must be sent to the coordinator. The worker sends the first token
of a request at once, the last tokens when the request ends, and the others every `flush_s`. Load
reports show the exact state at the time of the report, also in the middle of a run.

With `Shape.follows_step_targets`, prompts get their tokens by the policy of
runtime/steps/step_budget.py, as in Baton's engines; otherwise first come, first served, as in vLLM.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import WorkerKey
from baton.load.duration_histogram import DurationHistogram
from baton.runtime.durations import to_seconds
from baton.runtime.steps.latency import PrefillChunk
from baton.runtime.steps.request_targets import due_in_s, own_itl_s
from baton.runtime.steps.step_budget import StepTargets, StreamPace, Streams
from baton.runtime.steps.step_messages import from_message
from baton.simulator.fetches import Fetches
from baton.simulator.kv_room import num_blocks, num_steps_that_fit
from baton.simulator.parts import Run, Shape, SimulatedRequest
from baton.simulator.prompt_turns import in_order, within_targets
from baton.simulator.worker_caches import WorkerCaches
from baton.v1 import cluster_pb2, common_pb2

_TOKEN = 7
_UNSPECIFIED = common_pb2.FINISH_REASON_UNSPECIFIED
_STOP = common_pb2.FINISH_REASON_STOP
# Largest number of step samples in one load report.
_SAMPLES = 8


class Host(Protocol):
    """The part of `SimulatedCell` that a worker uses: clock, scheduler, messages."""

    now: float
    gaps: DurationHistogram
    prompt_tokens: Counter[str]

    def at(self, when: float, action: Callable[..., object], *arguments: object) -> None: ...
    def send(self, worker: SimulatedWorker, event: ev.Event) -> None: ...
    def worker_at(self, address: str) -> SimulatedWorker | None: ...
    def num_output_tokens(self, spec: cluster_pb2.RequestSpec) -> int: ...
    def ended(self, worker: SimulatedWorker) -> None: ...


class SimulatedWorker:
    """One simulated worker process with its vLLM-like scheduler; owned by `SimulatedCell`."""

    def __init__(
        self, host: Host, key: WorkerKey, role: common_pb2.Role.ValueType, shape: Shape
    ) -> None:
        self.host, self.key, self.role, self.shape = host, key, role, shape
        self.stopped = False
        # The coordinator's latest; None: prompts are computed first come, first served.
        self._step_targets = StepTargets() if shape.follows_step_targets else None
        self.num_steps = 0
        self._order = itertools.count()
        self._requests: dict[tuple[str, int], SimulatedRequest] = {}
        self._waiting: list[tuple[int, int, SimulatedRequest]] = []
        self._swapped: deque[SimulatedRequest] = deque()
        self._prefilling: list[SimulatedRequest] = []
        self._decoding: dict[SimulatedRequest, None] = {}
        # Interactive streams whose handoffs are on their way, or wait for a place.
        self._coming: dict[SimulatedRequest, None] = {}
        self._ends: list[tuple[int, int, SimulatedRequest]] = []
        # Number of steps with decodes. A decoding request makes one token in each of them, so its
        # token count follows from `joined_at_step`.
        self._step = 0
        self._kv_decoding = self._kv_prefilling = 0
        self._run: Run | None = None
        self._busy = False
        # Incremented when a run is rescheduled; events of an older version are ignored.
        self._version = 0
        self._flush_at = 0.0
        self._awaiting_first_output: list[SimulatedRequest] = []
        self.fetches = Fetches(self)
        self._samples: deque[cluster_pb2.StepSample] = deque(maxlen=_SAMPLES)
        self._sampled_at = 0.0
        self._loads_end_at = 0.0
        self._caches = WorkerCaches(
            shape, lambda changes: host.send(self, ev.WorkerCache(key, changes))
        )

    # ---- Commands of the coordinator.

    def take(self, command: ev.Command) -> None:
        if self.stopped:
            return
        if isinstance(command, cluster_pb2.CancelCommand):
            if command.attempt:
                self._cancel((command.request_id, command.attempt))
            else:
                self._cancel(_prefix_key(command.handoff_id))
                self.fetches.end(command.handoff_id)
        elif isinstance(command, cluster_pb2.PrefillCommand | cluster_pb2.DecodeCommand):
            self._begin(command)
        elif isinstance(command, cluster_pb2.SendPrefixCommand):
            self._send_prefix(command)
        elif isinstance(command, cluster_pb2.StepTargets):
            if self.shape.follows_step_targets:
                self._step_targets = from_message(command)
        elif isinstance(command, cluster_pb2.SetRoleCommand):
            self.role = command.role
            self._report_state(cluster_pb2.WORKER_STATE_SERVING)
        elif isinstance(command, cluster_pb2.DrainCommand):
            self._report_state(cluster_pb2.WORKER_STATE_DRAINING)
        elif isinstance(command, cluster_pb2.ReleaseCommand):
            self._report_state(cluster_pb2.WORKER_STATE_STOPPED)
            self.stopped = True
            self.host.ended(self)

    def _report_state(self, state: cluster_pb2.WorkerState.ValueType) -> None:
        change = cluster_pb2.WorkerStateChanged(state=state, role=self.role)
        self.host.send(self, ev.WorkerChanged(self.key, change))

    def _begin(self, command: cluster_pb2.PrefillCommand | cluster_pb2.DecodeCommand) -> None:
        spec, shape = command.spec, self.shape
        prefill_only = isinstance(command, cluster_pb2.PrefillCommand)
        is_handoff = not prefill_only and command.HasField("handoff")
        num_known = len(spec.known_token_ids)
        num_prompt = len(spec.prompt_token_ids)
        num_output = self.host.num_output_tokens(spec)
        total = num_prompt + num_known
        # A handoff lacks only the latest known token.
        num_uncomputed = max(1, total - command.handoff.num_tokens) if is_handoff else total
        request = SimulatedRequest(
            request_id=spec.request_id,
            attempt=spec.attempt,
            priority=spec.priority,
            order=next(self._order),
            num_output_tokens=num_output,
            num_uncomputed=num_uncomputed,
            num_computed=total - num_uncomputed,
            num_tokens=total,
            num_outputs_left=1 if prefill_only else max(1, num_output - num_known),
            offset=num_known,
            num_prompt_tokens=num_prompt,
            hashes=self._caches.hashes(spec),
            is_handoff=is_handoff,
            # The first token was made elsewhere. Its report to the coordinator and this command
            # took one message delay each.
            last_at=self.host.now - 2 * shape.delay_s if num_known else math.nan,
            arrived_at=self.host.now,
            due_at=self.host.now + due_in_s(spec),
            itl_s=own_itl_s(spec),
        )
        self._requests[request.key] = request
        if is_handoff:
            if not request.priority:
                self._coming[request] = None
            wait_s = 0.0
            if not shape.handoff_stalls:
                wait_s = shape.handoff_s + shape.handoff_per_token_s * num_prompt
            self.host.at(self.host.now + wait_s, self._arrive, request)
        elif command.HasField("fetch"):
            self.fetches.wait(request, command.fetch)
        else:
            self.load(request)

    def _send_prefix(self, command: cluster_pb2.SendPrefixCommand) -> None:
        """Lets a request compute one token after a cached prefix, then send the prefix."""
        request_id, attempt = _prefix_key(command.handoff.handoff_id)
        num_tokens = len(command.prompt_token_ids) + 1
        request = SimulatedRequest(
            request_id=request_id,
            attempt=attempt,
            priority=command.priority,
            order=next(self._order),
            num_output_tokens=2,
            num_uncomputed=num_tokens,
            num_computed=0,
            num_tokens=num_tokens,
            num_outputs_left=1,
            offset=0,
            num_prompt_tokens=num_tokens,
            hashes=self._caches.hashes(command),
            sends=command.handoff,
            arrived_at=self.host.now,
            due_at=self.host.now + to_seconds(command.timeout),
        )
        self._requests[request.key] = request
        self.load(request)

    def load(self, request: SimulatedRequest) -> None:
        """Takes what the prefix cache and host memory hold of a prompt before it waits for a step.

        The prefix cache is looked up again when the computation starts.
        """
        self._caches.take_held(request)
        lacks = request.sends is not None and request.num_uncomputed > 1
        if lacks and not self.fetches.shorten(request):
            # Another worker wants a prefix that is not here any more.
            self._cancel(request.key)
            self.fetches.refuse(request)
            return
        # Like vLLM's, the load runs beside the steps of other requests.
        loaded_at = self._load_from_host(request.num_host, self.host.now)
        self.host.at(loaded_at, self._arrive, request)

    def _load_from_host(self, num_tokens: int, begins_at: float) -> float:
        """Loads tokens from host memory after all earlier loads; returns when this load ends.

        Args:
            num_tokens: Tokens to load.
            begins_at: When the load may begin at the earliest.
        """
        if not num_tokens:
            return begins_at
        begins_at = max(begins_at, self._loads_end_at)
        self._loads_end_at = begins_at + self._caches.load_s(num_tokens)
        return self._loads_end_at

    # ---- Owner of its fetches.

    @property
    def now(self) -> float:
        return self.host.now

    def at(self, when: float, action: Callable[..., object], *arguments: object) -> None:
        """Calls an action unless this worker has stopped by then."""
        self.host.at(when, self._unless_stopped, action, *arguments)

    def _unless_stopped(self, action: Callable[..., object], *arguments: object) -> None:
        if not self.stopped:
            action(*arguments)

    def loaded(
        self, request: SimulatedRequest, plan: cluster_pb2.FetchPlan, num_tokens: int
    ) -> None:
        """Takes a fetched prefix into the prefix cache; the request then waits for a step."""
        num_cached, num_host = self._caches.held(request)
        # Left-out tokens that the device lacks are loaded from host memory meanwhile.
        num_host = min(num_host, max(0, plan.skip_tokens - num_cached)) if plan.host_tokens else 0
        if not plan.skip_tokens <= num_cached + num_host < num_tokens:
            self.load(request)
            return
        request.num_cached, request.num_host = num_cached, num_host
        request.num_fetched = num_tokens - num_cached - num_host
        request.use_held()
        self._caches.keep(request)
        loaded_at = self._load_from_host(num_host, request.arrived_at)
        self.host.at(max(self.host.now, loaded_at), self._arrive, request)

    def fetches_at(self, address: str) -> Fetches | None:
        worker = self.host.worker_at(address)
        return worker.fetches if worker is not None else None

    def report_handoff(self, report: cluster_pb2.HandoffReport) -> None:
        self.host.send(self, ev.WorkerHandoff(self.key, report))

    def _arrive(self, request: SimulatedRequest) -> None:
        if not request.ended and not self.stopped:
            heapq.heappush(self._waiting, (request.priority, request.order, request))
            self._batch_changed()

    def _cancel(self, key: tuple[str, int]) -> None:
        request = self._requests.pop(key, None)
        if request is not None:
            request.ended = True
            self._coming.pop(request, None)
            if request.fetches is not None:
                self.fetches.end(request.fetches.handoff_id)
            self._batch_changed()

    # ---- Steps.

    def _batch_changed(self) -> None:
        """Ends the run after its current step, because a request was added or cancelled."""
        if not self._busy:
            self._next_step()
        elif self._run is not None:
            num_steps = self._run.done_at(self.host.now) + 1
            if num_steps < self._run.num_steps:
                self._run.num_steps = num_steps
                self._schedule(self._run)

    def _schedule(self, run: Run) -> None:
        self._version += 1
        done_at = run.began_at + run.lasts_s(run.num_steps)
        self.host.at(done_at, self._run_over, self._version)

    def _next_step(self) -> None:
        if self.stopped:
            return
        self._busy, self._run = True, None
        self._remove_cancelled()
        stall_s = self._admit()
        self._preempt()
        if self._prefilling:
            self._mixed_step(stall_s)
        elif self._decoding:
            self._decode_run(stall_s)
        else:
            self._busy = False

    def _remove_cancelled(self) -> None:
        """Removes cancelled requests from the batch."""
        for request in [one for one in self._prefilling if one.ended]:
            self._prefilling.remove(request)
            self._kv_prefilling -= request.num_tokens
            self._caches.keep(request)
        for request in [one for one in self._decoding if one.ended]:
            self._remove_decode(request)

    def _remove_decode(self, request: SimulatedRequest) -> None:
        del self._decoding[request]
        self._kv_decoding -= request.num_tokens + self._step - request.joined_at_step
        self._caches.keep(request)

    def _admit(self) -> float:
        """Adds waiting requests to the batch; returns how many seconds handoffs stall the step."""
        shape, stall_s = self.shape, 0.0
        while self._waiting or self._swapped:
            request = self._swapped[0] if self._swapped else self._waiting[0][2]
            if not request.ended:
                if len(self._prefilling) + len(self._decoding) >= shape.max_num_seqs:
                    break
                if not self._has_room(request):
                    break
            if self._swapped:
                self._swapped.popleft()
            else:
                heapq.heappop(self._waiting)
            if request.ended:
                continue
            self._coming.pop(request, None)
            if request.is_handoff and shape.handoff_stalls and not request.first_sent:
                stall_s += shape.handoff_s + shape.handoff_per_token_s * request.num_computed
            if request.num_uncomputed == 1 and request.num_computed:
                self._join(request)
            else:
                self._prefilling.append(request)
                self._kv_prefilling += request.num_tokens
        return stall_s

    def _has_room(self, request: SimulatedRequest) -> bool:
        """Whether the free KV blocks hold a request and its next token; one request always runs."""
        if not self._decoding and not self._prefilling:
            return True
        size = self.shape.block_size_tokens
        room = int(self.shape.kv_tokens * (1 - self.shape.join_reserve_share)) // size
        return self._fits(0, room - num_blocks(request.num_tokens + 1, size))

    def _fits(self, num_steps: int, room_blocks: int) -> bool:
        """Whether the batch holds at most `room_blocks` KV blocks after `num_steps` more steps."""
        size, num_decodes = self.shape.block_size_tokens, len(self._decoding)
        num_prefills = len(self._prefilling)
        held = self._kv_decoding + self._kv_prefilling + num_steps * num_decodes + num_prefills
        if num_blocks(held, size) > room_blocks:
            return False
        # Every request has at most one block that is not full.
        if held // size + num_decodes + num_prefills <= room_blocks:
            return True
        grown = self._step + num_steps
        return (
            sum(
                num_blocks(one.num_tokens + grown - one.joined_at_step, size)
                for one in self._decoding
            )
            + sum(num_blocks(one.num_tokens + 1, size) for one in self._prefilling)
        ) <= room_blocks

    def _join(self, request: SimulatedRequest) -> None:
        request.joined_at_step, request.num_sent = self._step, 0
        # After a handoff, the gap since the first token counts too.
        last_at = self.host.now if math.isnan(request.last_at) else request.last_at
        request.pace = StreamPace(last_at, 0, request.itl_s)
        if request.is_handoff and not request.first_sent:
            self._caches.keep(request)
        self._decoding[request] = None
        self._kv_decoding += request.num_tokens
        heapq.heappush(
            self._ends, (self._step + request.num_outputs_left, next(self._order), request)
        )
        # The gap before the next token of these requests is longer than a step.
        if not request.first_sent or request.last_at < self.host.now:
            self._awaiting_first_output.append(request)

    def _decode_run(self, stall_s: float) -> None:
        shape, batch = self.shape, len(self._decoding)
        while not self._ends_then(*self._ends[0]):
            heapq.heappop(self._ends)
        num_steps = self._ends[0][0] - self._step
        if self._awaiting_first_output:
            num_steps = 1
        first_s = shape.model.decode_step_s(batch, self._kv_decoding)
        until_flush_s = self._flush_at - self.host.now
        num_steps = min(num_steps, max(1, math.ceil(until_flush_s / first_s)))
        num_steps = self._num_steps_in_room(num_steps)
        growth_s = shape.model.step_per_kv_token_s * batch
        if stall_s:
            # A step with a stall is a run of its own.
            num_steps, growth_s, first_s = 1, 0.0, first_s + stall_s
        self._run = Run(self.host.now, max(1, num_steps), first_s, growth_s)
        self._schedule(self._run)

    def _num_steps_in_room(self, most_steps: int) -> int:
        """Returns for how many steps the KV cache has room, from 1 to `most_steps`."""
        shape = self.shape
        num_all = shape.kv_tokens // shape.block_size_tokens
        if self._fits(most_steps, num_all):
            return most_steps
        lengths = [one.num_tokens + self._step - one.joined_at_step for one in self._decoding]
        return num_steps_that_fit(lengths, most_steps, num_all, shape.block_size_tokens)

    def _ends_then(self, step: int, order: int, request: SimulatedRequest) -> bool:
        """Whether an entry of `_ends` is current; it is not after a cancel or a preemption."""
        if request.ended or request not in self._decoding:
            return False
        return step == request.joined_at_step + request.num_outputs_left

    def _preempt(self) -> None:
        """Preempts the latest requests until the KV cache has room for one step of the others."""
        num_all = self.shape.kv_tokens // self.shape.block_size_tokens
        while self._decoding and len(self._decoding) + len(self._prefilling) > 1:
            if self._fits(1, num_all):
                return
            if self._prefilling:
                request = self._prefilling.pop()
                self._kv_prefilling -= request.num_tokens
                self._caches.keep(request)
                self._compute_again(request)
            else:
                self._preempt_decode(next(reversed(self._decoding)))

    def _preempt_decode(self, request: SimulatedRequest) -> None:
        if count := self._num_unsent(request):
            self._send_outputs([self._output(request, count)])
        made = self._step - request.joined_at_step
        if made:
            request.last_at = self.host.now
        elif request in self._awaiting_first_output:
            self._awaiting_first_output.remove(request)
        self._remove_decode(request)
        request.num_tokens += made
        request.num_outputs_left -= made
        if self.shape.swaps:
            request.num_uncomputed, request.num_computed = 1, request.num_tokens - 1
            self._swapped.appendleft(request)
        else:
            self._compute_again(request)

    def _compute_again(self, request: SimulatedRequest) -> None:
        """Lets a preempted request wait for room; then its KV cache is computed again."""
        self._caches.take_held(request)
        self._swapped.appendleft(request)

    def _run_over(self, version: int) -> None:
        run = self._run
        if version != self._version or run is None or self.stopped:
            return
        self._advance(run.num_steps, run.first_s, run.growth_s)
        self._record(run, run.num_steps)
        self._send_due_outputs()
        self._next_step()

    def _record(self, run: Run, num_steps: int) -> None:
        """Adds samples of the run's first `num_steps` steps that ended after the last report."""
        batch = len(self._decoding)
        held = self._kv_decoding - num_steps * batch
        for index in range(0, num_steps, max(1, -(-num_steps // _SAMPLES))):
            ended_at = run.began_at + run.lasts_s(index + 1)
            if ended_at > self._sampled_at:
                self._samples.append(
                    cluster_pb2.StepSample(
                        num_decodes=batch,
                        num_kv_tokens=held + index * batch,
                        duration_us=round((run.first_s + index * run.growth_s) * 1e6),
                    )
                )

    def _advance(self, num_steps: int, first_s: float, growth_s: float) -> None:
        """Counts `num_steps` finished steps: every decoding request has one more token per step."""
        batch = len(self._decoding)
        self.num_steps += num_steps
        self._step += num_steps
        self._kv_decoding += num_steps * batch
        ended_at = self.host.now
        num_new = 0
        for request in self._awaiting_first_output:
            if not request.ended and not math.isnan(request.last_at):
                # The gap from the first token, made on another worker, to the first one here.
                self.host.gaps.add_evenly(ended_at - request.last_at, 0.0, 1)
                num_new += 1
        self.host.gaps.add_evenly(first_s, 0.0, batch - num_new)
        if num_steps > 1:
            rest = num_steps - 1
            self.host.gaps.add_evenly(first_s + growth_s, growth_s * max(0, rest - 1), rest * batch)

    def _send_due_outputs(self) -> None:
        """Sends ended requests, first tokens and, every `flush_s`, all other unsent tokens."""
        outputs = []
        while self._ends and self._ends[0][0] <= self._step:
            end = heapq.heappop(self._ends)
            if not self._ends_then(*end):
                continue
            request = end[2]
            if request.sends is not None:
                self._requests.pop(request.key, None)
                request.ended = True
                self._remove_decode(request)
                self.fetches.send(request.sends)
                continue
            output = self._output(request, self._num_unsent(request))
            output.finished.reason = _STOP
            outputs.append(output)
            request.ended = True
            self._requests.pop(request.key, None)
            self._remove_decode(request)
        for request in self._awaiting_first_output:
            if not request.ended and request in self._decoding:
                outputs.append(self._output(request, self._num_unsent(request)))
        self._awaiting_first_output.clear()
        if self.host.now >= self._flush_at:
            self._flush_at = self.host.now + self.shape.flush_s
            outputs += [
                self._output(request, count)
                for request in self._decoding
                if not request.ended and (count := self._num_unsent(request))
            ]
        self._send_outputs(outputs)

    def _num_unsent(self, request: SimulatedRequest) -> int:
        return self._step - request.joined_at_step - request.num_sent

    def _send_outputs(self, outputs: list[cluster_pb2.RequestOutput]) -> None:
        if outputs:
            step = cluster_pb2.StepOutputs(step=self.num_steps, outputs=outputs)
            self.host.send(self, ev.WorkerStep(self.key, step))

    def _output(self, request: SimulatedRequest, count: int) -> cluster_pb2.RequestOutput:
        output = cluster_pb2.RequestOutput(request_id=request.request_id, attempt=request.attempt)
        output.delta.offset = request.offset
        output.delta.token_ids.extend(itertools.repeat(_TOKEN, count))
        if not request.first_sent:
            if request.num_held:
                output.timings.num_cached_tokens = request.num_cached
                output.timings.num_host_tokens = request.num_host
                output.timings.num_fetched_tokens = request.num_fetched
            if not request.is_handoff:
                self.host.prompt_tokens.update(
                    device=request.num_cached,
                    host=request.num_host,
                    fetched=request.num_fetched,
                    computed=max(0, request.num_prompt_tokens - request.num_held),
                )
        request.first_sent = True
        request.offset += count
        request.num_sent += count
        return output

    # ---- Prompts.

    def _mixed_step(self, stall_s: float) -> None:
        shape, batch = self.shape, len(self._decoding)
        targets = self._step_targets
        for request in self._prefilling:
            if not request.has_begun:
                self._caches.expect_more(request)
        if targets is None:
            work = in_order(self._prefilling, shape, batch)
        else:
            streams = Streams.of(batch, self._kv_decoding, self._paces(targets), targets)
            work = within_targets(self._prefilling, shape, targets, streams, self.host.now)
        for request, _ in work:
            if not request.has_begun:
                self._caches.take_held_at_start(request)
        chunks = [
            PrefillChunk(request.num_computed - request.num_held, count) for request, count in work
        ]
        took_s = shape.model.step_s(chunks, batch, self._kv_decoding) + stall_s
        sample = cluster_pb2.StepSample(
            num_prefill_tokens=sum(one.num_tokens for one in chunks),
            num_decodes=batch,
            num_kv_tokens=self._kv_decoding,
            prefill_token_squares=sum(one.token_squares for one in chunks),
            duration_us=round(took_s * 1e6),
        )
        self.host.at(self.host.now + took_s, self._mixed_over, work, sample, took_s)

    def _paces(self, targets: StepTargets) -> Iterator[StreamPace]:
        """Yields how streams, and those that are coming, compare with their ITL targets.

        Batch streams have none.
        """
        for request in self._coming:
            yield StreamPace.coming(self.host.now, request.itl_s)
        for request in self._decoding:
            if not request.priority:
                assert request.pace is not None
                num_tokens = self._step - request.joined_at_step
                request.pace.advance(targets, self.host.now, num_tokens)
                yield request.pace

    def _mixed_over(
        self,
        work: Sequence[tuple[SimulatedRequest, int]],
        sample: cluster_pb2.StepSample,
        took_s: float,
    ) -> None:
        if self.stopped:
            return
        self._samples.append(sample)
        self._advance(1, took_s, 0.0)
        outputs = []
        for request, count in work:
            request.num_uncomputed -= count
            request.num_computed += count
            if not request.num_uncomputed and not request.ended:
                outputs.append(self._first_token(request))
        self._send_outputs(outputs)
        self._send_due_outputs()
        self._next_step()

    def _first_token(self, request: SimulatedRequest) -> cluster_pb2.RequestOutput:
        """Returns the output with the first token of a request with a fully computed prompt."""
        self._prefilling.remove(request)
        self._kv_prefilling -= request.num_tokens
        if not math.isnan(request.last_at):
            self.host.gaps.add_evenly(self.host.now - request.last_at, 0.0, 1)
        request.last_at = self.host.now
        request.num_sent = 0
        output = self._output(request, 1)
        self._caches.keep(request)
        request.num_outputs_left -= 1
        request.num_tokens += 1
        if request.num_outputs_left:
            request.num_uncomputed = 1
            self._join(request)
            return output
        whole = request.offset >= request.num_output_tokens
        output.finished.reason = _STOP if whole else _UNSPECIFIED
        request.ended = True
        self._requests.pop(request.key, None)
        return output

    # ---- Reports.

    def report(self) -> cluster_pb2.LoadReport:
        """Returns the load at this moment, also in the middle of a run."""
        num_steps, held = self.num_steps, self._kv_decoding + self._kv_prefilling
        if self._run is not None and self._busy:
            done = self._run.done_at(self.host.now)
            num_steps += done
            held += done * len(self._decoding)
            self._kv_decoding += done * len(self._decoding)
            self._record(self._run, done)
            self._kv_decoding -= done * len(self._decoding)
        samples = list(self._samples)
        self._samples.clear()
        self._sampled_at = self.host.now
        return cluster_pb2.LoadReport(
            num_steps=num_steps,
            num_running=len(self._prefilling) + len(self._decoding),
            num_waiting=len(self._waiting) + len(self._swapped),
            kv_tokens_used=held,
            kv_tokens_total=self.shape.kv_tokens,
            steps=samples,
            host_loads=self._caches.take_loads(),
        )


def _prefix_key(handoff_id: bytes) -> tuple[str, int]:
    """Returns the request ID and the attempt of a request that sends a cached prefix."""
    return f"prefix {handoff_id.hex()}", 0
