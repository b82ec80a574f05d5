"""A simulated worker that skips ahead: steps with the same batch are one event until it changes.

What can change them is a request that joins or ends, room that runs out, a prompt to compute, and
the moment at which tokens that were made are passed on to the coordinator: the first one of every
request here at once, the last ones with its end, those between every `flush_s`. Reports show the
engine as it is at that moment, step by step.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import WorkerKey
from baton.load.gap_histogram import GapHistogram
from baton.runtime.block_hashes import block_hashes, root_of
from baton.runtime.latency import PrefillChunk
from baton.simulator.parts import Live, PrefixCache, Run, Shape
from baton.v1 import cluster_pb2, common_pb2

_TOKEN = 7
_UNSPECIFIED = common_pb2.FINISH_REASON_UNSPECIFIED
_LENGTH = common_pb2.FINISH_REASON_LENGTH
# Step samples per report; reports show how long steps take, not every one of them.
_SAMPLES = 8


class Host(Protocol):
    """The simulation around an engine."""

    now: float
    tally: GapHistogram

    def at(self, when: float, action: Callable[..., object], *arguments: object) -> None: ...
    def tell(self, worker: Engine, event: ev.Event) -> None: ...
    def ended(self, worker: Engine) -> None: ...


class Engine:
    """One simulated worker process."""

    def __init__(
        self, host: Host, key: WorkerKey, role: common_pb2.Role.ValueType, shape: Shape
    ) -> None:
        self.host, self.key, self.role, self.shape = host, key, role, shape
        self.gone = False
        self.num_steps = 0
        self._order = itertools.count()
        self._live: dict[tuple[str, int], Live] = {}
        self._waiting: list[tuple[int, int, Live]] = []
        self._swapped: deque[Live] = deque()
        self._prefilling: list[Live] = []
        self._decoding: dict[Live, None] = {}
        self._ends: list[tuple[int, int, Live]] = []
        # Of decodes, counted for the engine as a whole: each made one token in every step since it
        # joined.
        self._step = 0
        self._kv_decoding = self._kv_prefilling = 0
        self._run: Run | None = None
        self._busy = False
        self._version = 0
        self._flush_at = 0.0
        self._first: list[Live] = []
        self._samples: deque[cluster_pb2.StepSample] = deque(maxlen=_SAMPLES)
        self._sampled_at = 0.0
        self._cache = (
            PrefixCache(shape.kv_tokens, shape.block_size_tokens) if shape.prefix_caching else None
        )

    # ---- What the coordinator sends.

    def take(self, command: ev.Command) -> None:
        if self.gone:
            return
        if isinstance(command, cluster_pb2.CancelCommand):
            self._cancel((command.request_id, command.attempt))
        elif isinstance(command, cluster_pb2.PrefillCommand | cluster_pb2.DecodeCommand):
            self._begin(command)
        elif isinstance(command, cluster_pb2.SetRoleCommand):
            self.role = command.role
            self._say(cluster_pb2.WORKER_STATE_SERVING)
        elif isinstance(command, cluster_pb2.DrainCommand):
            self._say(cluster_pb2.WORKER_STATE_DRAINING)
        elif isinstance(command, cluster_pb2.ReleaseCommand):
            self._say(cluster_pb2.WORKER_STATE_STOPPED)
            self.gone = True
            self.host.ended(self)

    def _say(self, state: cluster_pb2.WorkerState.ValueType) -> None:
        change = cluster_pb2.WorkerStateChanged(state=state, role=self.role)
        self.host.tell(self, ev.WorkerChanged(self.key, change))

    def _begin(self, command: cluster_pb2.PrefillCommand | cluster_pb2.DecodeCommand) -> None:
        spec, shape = command.spec, self.shape
        prefill_only = isinstance(command, cluster_pb2.PrefillCommand)
        handed = not prefill_only and command.HasField("handoff")
        num_known = len(spec.known_token_ids)
        num_prompt = len(spec.prompt_token_ids)
        total = num_prompt + num_known
        hashes: Sequence[int] = ()
        num_cached = 0
        if self._cache is not None:
            hashes = block_hashes(
                spec.prompt_token_ids, shape.block_size_tokens, root_of(spec.adapter)
            )
            num_cached = 0 if handed else min(self._cache.num_cached(hashes), total - 1)
        num_missing = num_known or 1 if handed else total - num_cached
        live = Live(
            request_id=spec.request_id,
            attempt=spec.attempt,
            priority=spec.priority,
            order=next(self._order),
            max_tokens=spec.sampling.max_tokens,
            num_missing=num_missing,
            num_done=total - num_missing,
            num_tokens=total,
            num_left=1 if prefill_only else max(1, spec.sampling.max_tokens - num_known),
            offset=num_known,
            hashes=hashes,
            num_cached=num_cached,
            handed=handed,
            # It was told to the coordinator, which told this worker.
            last_at=self.host.now - 2 * shape.delay_s if num_known else math.nan,
        )
        self._live[live.key] = live
        wait_s = 0.0
        if handed and not shape.handoff_stalls:
            wait_s = shape.handoff_s + shape.handoff_per_token_s * num_prompt
        self.host.at(self.host.now + wait_s, self._arrive, live)

    def _arrive(self, live: Live) -> None:
        if not live.gone and not self.gone:
            heapq.heappush(self._waiting, (live.priority, live.order, live))
            self._wake()

    def _cancel(self, key: tuple[str, int]) -> None:
        live = self._live.pop(key, None)
        if live is not None:
            live.gone = True
            self._wake()

    # ---- Steps.

    def _wake(self) -> None:
        """Something has changed: it counts from the next step on."""
        if not self._busy:
            self._go()
        elif self._run is not None:
            num_steps = self._run.done_at(self.host.now) + 1
            if num_steps < self._run.num_steps:
                self._run.num_steps = num_steps
                self._schedule(self._run)

    def _schedule(self, run: Run) -> None:
        self._version += 1
        done_at = run.began_at + run.lasts_s(run.num_steps)
        self.host.at(done_at, self._run_over, self._version)

    def _go(self) -> None:
        if self.gone:
            return
        self._busy, self._run = True, None
        self._forget()
        stall_s = self._admit()
        if self._prefilling:
            self._mixed_step(stall_s)
        elif self._decoding:
            self._decode_run(stall_s)
        else:
            self._busy = False

    def _forget(self) -> None:
        """Lets go of those that were cancelled."""
        for live in [one for one in self._prefilling if one.gone]:
            self._prefilling.remove(live)
            self._kv_prefilling -= live.num_tokens
            self._keep(live)
        for live in [one for one in self._decoding if one.gone]:
            self._leave(live)

    def _leave(self, live: Live) -> None:
        del self._decoding[live]
        self._kv_decoding -= live.num_tokens + self._step - live.joined_at_step
        self._keep(live)

    def _admit(self) -> float:
        """Takes in those that wait; seconds that it costs."""
        shape, stall_s = self.shape, 0.0
        while self._waiting or self._swapped:
            live = self._swapped[0] if self._swapped else self._waiting[0][2]
            if not live.gone:
                if len(self._prefilling) + len(self._decoding) >= shape.max_num_seqs:
                    break
                held = self._kv_decoding + self._kv_prefilling
                room = shape.kv_tokens * (1 - shape.join_reserve_share)
                if held and held + live.num_tokens + 1 > room:
                    break
            if self._swapped:
                self._swapped.popleft()
            else:
                heapq.heappop(self._waiting)
            if live.gone:
                continue
            if live.handed and shape.handoff_stalls and not live.first_told:
                stall_s += shape.handoff_s + shape.handoff_per_token_s * live.num_done
            if live.num_missing == 1 and live.num_done:
                self._join(live)
            else:
                self._prefilling.append(live)
                self._kv_prefilling += live.num_tokens
        return stall_s

    def _join(self, live: Live) -> None:
        live.joined_at_step, live.told = self._step, 0
        self._decoding[live] = None
        self._kv_decoding += live.num_tokens
        heapq.heappush(self._ends, (self._step + live.num_left, next(self._order), live))
        if not live.first_told:
            self._first.append(live)

    def _decode_run(self, stall_s: float) -> None:
        shape = self.shape
        self._make_room()
        batch = len(self._decoding)
        while not self._still(*self._ends[0]):
            heapq.heappop(self._ends)
        num_steps = self._ends[0][0] - self._step
        num_steps = min(num_steps, max(1, (shape.kv_tokens - self._kv_decoding) // batch))
        if self._first:
            num_steps = 1
        first_s = shape.model.decode_step_s(batch, self._kv_decoding)
        until_flush_s = self._flush_at - self.host.now
        num_steps = min(num_steps, max(1, math.ceil(until_flush_s / first_s)))
        more_s = shape.model.step_per_kv_token_s * batch
        if stall_s:
            # The stall is a part of the first step, which is alone.
            num_steps, more_s, first_s = 1, 0.0, first_s + stall_s
        self._run = Run(self.host.now, max(1, num_steps), first_s, more_s)
        self._schedule(self._run)

    def _still(self, step: int, order: int, live: Live) -> bool:
        """Whether a request ends then: it may have left, or have left and come back."""
        if live.gone or live not in self._decoding:
            return False
        return step == live.joined_at_step + live.num_left

    def _make_room(self) -> None:
        """The latest make room until all can make a token."""
        while len(self._decoding) > 1:
            if self._kv_decoding + len(self._decoding) <= self.shape.kv_tokens:
                return
            live = next(reversed(self._decoding))
            self._pass_on([live])
            made = self._step - live.joined_at_step
            self._leave(live)
            live.num_tokens, live.num_left = live.num_tokens + made, live.num_left - made
            live.num_missing, live.num_done = 1, live.num_tokens - 1
            if not self.shape.swaps:
                live.num_missing, live.num_done = live.num_tokens, 0
            self._swapped.appendleft(live)

    def _run_over(self, version: int) -> None:
        run = self._run
        if version != self._version or run is None or self.gone:
            return
        self._count(run.num_steps, run.first_s, run.more_s)
        self._record(run, run.num_steps)
        self._made()
        self._go()

    def _record(self, run: Run, num_steps: int) -> None:
        """Samples of steps that have been made since the last report."""
        batch = len(self._decoding)
        held = self._kv_decoding - num_steps * batch
        for index in range(0, num_steps, max(1, -(-num_steps // _SAMPLES))):
            ended_at = run.began_at + run.lasts_s(index + 1)
            if ended_at > self._sampled_at:
                self._samples.append(
                    cluster_pb2.StepSample(
                        num_decodes=batch,
                        num_kv_tokens=held + index * batch,
                        duration_us=round((run.first_s + index * run.more_s) * 1e6),
                    )
                )

    def _count(self, num_steps: int, first_s: float, more_s: float) -> None:
        """So many steps are over; every request that decodes has as many tokens more."""
        batch = len(self._decoding)
        self.num_steps += num_steps
        self._step += num_steps
        self._kv_decoding += num_steps * batch
        ended_at = self.host.now
        num_new = 0
        for live in self._first:
            if not live.gone and not math.isnan(live.last_at):
                # From its first token, made elsewhere, to its first one here.
                self.host.tally.gaps(ended_at - live.last_at, 0.0, 1)
                num_new += 1
        self.host.tally.gaps(first_s, 0.0, batch - num_new)
        if num_steps > 1:
            rest = num_steps - 1
            self.host.tally.gaps(first_s + more_s, more_s * max(0, rest - 1), rest * batch)

    def _made(self) -> None:
        """Passes on what the coordinator is to know: first tokens, ends, and the rest when due."""
        outputs = []
        while self._ends and self._ends[0][0] <= self._step:
            end = heapq.heappop(self._ends)
            if not self._still(*end):
                continue
            live = end[2]
            output = self._output(live, self._step - live.joined_at_step - live.told)
            output.finished.reason = _LENGTH
            outputs.append(output)
            live.gone = True
            self._live.pop(live.key, None)
            self._leave(live)
        for live in self._first:
            if not live.gone and live in self._decoding:
                outputs.append(self._output(live, self._step - live.joined_at_step - live.told))
        self._first.clear()
        if self.host.now >= self._flush_at:
            self._flush_at = self.host.now + self.shape.flush_s
            outputs += [
                self._output(live, count)
                for live in self._decoding
                if not live.gone and (count := self._step - live.joined_at_step - live.told)
            ]
        self._tell(outputs)

    def _pass_on(self, lives: Sequence[Live]) -> None:
        self._tell(
            [
                self._output(live, count)
                for live in lives
                if (count := self._step - live.joined_at_step - live.told)
            ]
        )

    def _tell(self, outputs: list[cluster_pb2.RequestOutput]) -> None:
        if outputs:
            step = cluster_pb2.StepOutputs(step=self.num_steps, outputs=outputs)
            self.host.tell(self, ev.WorkerStep(self.key, step))

    def _output(self, live: Live, count: int) -> cluster_pb2.RequestOutput:
        output = cluster_pb2.RequestOutput(request_id=live.request_id, attempt=live.attempt)
        output.delta.offset = live.offset
        output.delta.token_ids.extend(itertools.repeat(_TOKEN, count))
        if not live.first_told and live.num_cached:
            output.timings.num_cached_tokens = live.num_cached
        live.first_told = True
        live.offset += count
        live.told += count
        return output

    # ---- Prompts.

    def _mixed_step(self, stall_s: float) -> None:
        shape, batch = self.shape, len(self._decoding)
        budget = max(1, shape.max_num_batched_tokens - batch)
        work: list[tuple[Live, int]] = []
        chunks: list[PrefillChunk] = []
        for live in self._prefilling:
            count = min(live.num_missing, budget)
            if count < live.num_missing and not shape.chunked:
                if work:
                    break
                count = live.num_missing
            if count <= 0:
                break
            budget -= count
            work.append((live, count))
            chunks.append(PrefillChunk(live.num_done - live.num_cached, count))
        took_s = shape.model.step_s(chunks, batch, self._kv_decoding) + stall_s
        sample = cluster_pb2.StepSample(
            num_prefill_tokens=sum(one.num_tokens for one in chunks),
            num_decodes=batch,
            num_kv_tokens=self._kv_decoding,
            prefill_token_squares=sum(one.token_squares for one in chunks),
            duration_us=round(took_s * 1e6),
        )
        self.host.at(self.host.now + took_s, self._mixed_over, work, sample, took_s)

    def _mixed_over(
        self, work: Sequence[tuple[Live, int]], sample: cluster_pb2.StepSample, took_s: float
    ) -> None:
        if self.gone:
            return
        self._samples.append(sample)
        self._count(1, took_s, 0.0)
        outputs = []
        for live, count in work:
            live.num_missing -= count
            live.num_done += count
            if not live.num_missing and not live.gone:
                outputs.append(self._first_token(live))
        self._tell(outputs)
        self._made()
        self._go()

    def _first_token(self, live: Live) -> cluster_pb2.RequestOutput:
        """A prompt is computed, and with it one token."""
        self._prefilling.remove(live)
        self._kv_prefilling -= live.num_tokens
        if not math.isnan(live.last_at):
            self.host.tally.gaps(self.host.now - live.last_at, 0.0, 1)
        live.last_at = self.host.now
        live.told = 0
        output = self._output(live, 1)
        live.num_left -= 1
        live.num_tokens += 1
        if live.num_left:
            live.num_missing = 1
            self._join(live)
            return output
        whole = live.offset >= live.max_tokens
        output.finished.reason = _LENGTH if whole else _UNSPECIFIED
        live.gone = True
        self._live.pop(live.key, None)
        self._keep(live)
        return output

    def _keep(self, live: Live) -> None:
        """Blocks of a request that has left stay until others need the room."""
        if self._cache is not None:
            changes = self._cache.keep(live.hashes, live.num_done)
            if changes is not None:
                self.host.tell(self, ev.WorkerCache(self.key, changes))

    # ---- Reports.

    def report(self) -> cluster_pb2.LoadReport:
        """The engine now, in the middle of a run too."""
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
        )
