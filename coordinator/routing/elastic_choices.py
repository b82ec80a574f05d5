"""Chooses the workers of an elastic cell: any worker may compute a prompt and decode its output.

All costs are predicted seconds. The rule compares all workers of a small cell. A large cell is
divided into groups; the rule then compares the workers of the least loaded group, the workers that
hold the prompt's prefix, the session's last workers, and the workers with most KV room and with the
shortest prefill queue.

1. The prefill worker is the one where the first token comes soonest. The prediction includes the
   prompts that the worker computes first, the speed that its decodes leave for prompts, prefix
   hits, and the fetch of a prefix from another worker, which happens while the prompt waits. Added
   to it is the harm to others: longer prompts of that worker, which it computes later because of
   this one, and its streams.
2. The decode worker: each worker that decodes pays the base time of a decode step, and computes
   prompts at a fraction of its speed. The rule therefore spreads the decodes evenly over the
   smallest number of workers that keep the ITL target. The other workers finish their decodes, and
   then compute prompts at full speed. There are two exceptions:
   - If prompts are few and short, workers with decodes compute them soon enough. The decodes are
     then spread over more workers, before steps come close to the target. They are also spread
     while several workers are idle.
   - If gaps may be long (core/gap_choice.py) and a step with one stream takes most of the ITL
     target, workers without decodes would leave the other workers no time for prompts. The decodes
     are then spread over all workers.
3. If the decodes are spread over all workers for long gaps, the decode worker also computes the
   prompt if the first token is in time there. The prefill worker also decodes an output of few
   tokens if it computes no other prompt, and any output if a step takes most of the ITL target, it
   has no decodes, and other workers are idle. If a handoff between the two workers is impossible,
   one worker computes the prompt and decodes the output: the best prefill worker whose steps then
   keep the ITL target.
4. A request waits while one of its workers has no room. An interactive request that no worker can
   serve within its TTFT target is late. Late and batch requests are placed only where they delay no
   request that can be in time, until they have waited for long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from heapq import nsmallest
from typing import NamedTuple

from baton.coordinator.routing.choices import DecodeChoice, NoPlacement, PrefillChoice
from baton.coordinator.routing.prefix_fetches import PrefixFetches
from baton.coordinator.routing.prefix_match import NUM_HOLDERS, HeldPrefix, PrefixMatch
from baton.coordinator.routing.prompt_demand import PromptDemand
from baton.coordinator.routing.router import Router
from baton.coordinator.routing.worker_load import WorkerLoad
from baton.coordinator.state.requests import SessionKey, WorkerKey
from baton.runtime.step_budget import StepTargets

# Share of the ITL target that a decode step may take with one more decode: when prompts find free
# workers, and when they do not. Below capacity, a margin keeps streams fast; at capacity, it would
# cost prompts more time than it saves streams.
_JOIN_SHARE, _JOIN_SHARE_UNDER_PRESSURE = 0.92, 1.0
# Share of the ITL target that a decode step may take while workers with decodes compute prompts
# soon enough. It is smaller, because outputs grow, so that a step just within the target becomes
# too long. In simulations with long outputs, shares of 0.75 to 0.85 served equally many requests in
# time; smaller shares leave fewer fast workers for prompts.
_SPREAD_SHARE = 0.85
# The pressure is the share of recent placements at which every fast worker had prompts for more
# than one step: a running mean with this weight for the latest placement. The join share grows with
# the pressure, and reaches _JOIN_SHARE_UNDER_PRESSURE at a pressure of 1 / _PRESSURE_GAIN.
_PRESSURE_WEIGHT, _PRESSURE_GAIN = 0.03, 6.0
# With at least this many idle workers, and at most this pressure, outputs are spread too: prompts
# find a free worker also if one of these decodes.
_NUM_SPARE, _SPARE_PRESSURE = 3, 0.1
# A worker is fast if it computes prompts at more than this share of its full speed.
_FAST_SPEED = 1 / 3
# A worker takes another prompt while less than this much prefill work would go before it.
AHEAD_S = 0.2
# Late and batch requests go only to workers without prompts that keep at least this speed.
_LATE_SPEED = 0.3
# Extra weight of a second of computation compared with a second of waiting. pool_choices.py gives
# the reason, and has a larger weight.
_WORK_WEIGHT = 1.0
# If no worker keeps the ITL target even with one decode, the target is this many times the fastest
# worker's step with one decode.
_UNREACHABLE = 2.0
# A handoff makes an output's first gap about one step longer, so that outputs of few tokens miss
# the ITL target. If a step takes more than this share of the target, the prefill worker decodes any
# output while this many other workers are idle. In simulations, smaller shares and fewer idle
# workers delayed prompts by more than outputs gained.
_TIGHT_SHARE, _NUM_IDLE = 0.8, 2
# The prefill worker decodes outputs of at most this many tokens, unless it computes other prompts,
# which the decode would slow down. The second number applies if steps take more than _TIGHT_SHARE.
# Larger numbers delayed prompts by more than outputs gained.
_FEW_TOKENS, _FEW_TOKENS_TIGHT = 4, 8
# Number of candidates that may fetch the prompt's beginning from another worker.
_NUM_FETCHING = 4
# Added to the cost of a prefill worker that would miss the TTFT target, in seconds, so that any
# worker that meets the target is preferred.
_TOO_LATE_S = 1000.0
# A late request may join another late request on a worker only if that worker must compute at most
# this share of the tokens that the median candidate must compute.
_SMALL_SHARE = 0.75


class Demand(NamedTuple):
    """The needs of a request.

    Attributes:
        num_tokens: Tokens to compute without any cache: the prompt, and the output known so far.
        num_output_tokens: Output tokens for which KV room is reserved; 0: the request ends with its
            first token.
        num_mean_tokens: KV tokens that similar requests have on average while they decode.
        due_in_s: Seconds until the first token is due; infinite if it has no target.
        itl_s: ITL target of interactive requests, in seconds.
        others_go_first_if_late: Whether the request is not placed if its first token would be late.
        is_late: Whether its first token will be late on any worker.
        waits_for_others: Whether it is placed only where it delays no request that can be in time.
        must_place: Whether it is placed even if other requests then miss their ITL target.
        continues: Whether it is a stream that lost its worker; it does not wait until the worker's
            other prompts are computed.
        session: The session; None means no session.
        may_fetch: Whether the prefill worker may fetch the prompt's beginning from another worker.
        is_batch: Whether it is a batch request, which may be parked for interactive requests.
    """

    num_tokens: int
    num_output_tokens: int
    num_mean_tokens: int
    due_in_s: float
    itl_s: float
    others_go_first_if_late: bool = False
    is_late: bool = False
    waits_for_others: bool = False
    must_place: bool = False
    continues: bool = False
    session: SessionKey | None = None
    may_fetch: bool = True
    is_batch: bool = False


class ElasticPlacement(NamedTuple):
    """The worker that computes a prompt, and the one that decodes its output.

    Attributes:
        prefill: where the prompt is computed.
        decode: where the output is decoded; None: the request ends with its first token.
    """

    prefill: PrefillChoice
    decode: DecodeChoice | None


class _Candidate(NamedTuple):
    """A worker that the rule compares.

    Attributes:
        load: the worker's load.
        held: the prefix of the prompt that the worker holds.
        prefill: the worker as the prefill worker, without a fetch.
        fetch: the same with a fetch from another worker; None: no other worker holds more of the
            prompt.
    """

    load: WorkerLoad
    held: HeldPrefix
    prefill: PrefillChoice
    fetch: PrefillChoice | None

    @property
    def choices(self) -> tuple[PrefillChoice, ...]:
        """The worker as the prefill worker, without and with the fetch."""
        return (self.prefill,) if self.fetch is None else (self.prefill, self.fetch)

    @property
    def soonest(self) -> PrefillChoice:
        """The choice with which the first token comes sooner."""
        if self.fetch is None or self.prefill.predicted_s <= self.fetch.predicted_s:
            return self.prefill
        return self.fetch


class ElasticChoices:
    """Chooses workers of one fleet for requests.

    Args:
        router: Router of the fleet's workers, with step targets.
        fetches: Fetches between these workers.
        prompts: Recent prompts, which the owner adds.
    """

    def __init__(self, router: Router, fetches: PrefixFetches, prompts: PromptDemand) -> None:
        self._router, self._fetches, self._prompts = router, fetches, prompts
        self._pressure = 0.0

    def place(self, match: PrefixMatch, demand: Demand) -> ElasticPlacement | NoPlacement:
        """Returns the workers for a request, or why it waits."""
        candidates = self._candidates(match, demand)
        if self._is_late(candidates, demand):
            return NoPlacement.LATE
        prefill = self._choose_prefill(candidates, demand)
        if isinstance(prefill, NoPlacement):
            return prefill
        if not demand.num_output_tokens:
            return ElasticPlacement(prefill, None)
        decode = self._choose_decode(candidates, demand)
        if decode is None:
            return NoPlacement.FULL
        shares = self._targets.shares_workers(_fastest_step_s(candidates))
        if shares and prefill.worker != decode.worker and not demand.waits_for_others:
            prefill = self._prefill_at_decode(candidates, prefill, decode, demand)
        return ElasticPlacement(
            prefill, self._decode_at_prefill(candidates, prefill, decode, demand)
        )

    def place_on_one(self, match: PrefixMatch, demand: Demand) -> ElasticPlacement | NoPlacement:
        """Returns one worker for both parts of a request without a handoff, or why it waits.

        The caller has called `place`, which returned two workers. The worker is the best prefill
        worker among those that keep the ITL target with this output. If there is none, it is the
        worker with the shortest decode steps; for an interactive request, after the batch outputs
        there are parked.
        """

        def step_s(one: _Candidate) -> float:
            load = one.load
            # Only interactive requests let batch outputs be parked (core/dispatch.py).
            if demand.is_batch:
                return load.mean_itl_s(1, added)
            return load.mean_itl_after_parking_s(1, added)

        candidates = self._candidates(match, demand)
        num_tokens, added = demand.num_tokens + demand.num_output_tokens, demand.num_mean_tokens
        longest_s = self._longest_step_s(demand, _fastest_step_s(candidates))
        with_room = [one for one in candidates if self._has_room(one.load, num_tokens)]
        found = [
            one
            for one in with_room
            if not one.load.num_decodes or one.load.mean_itl_s(1, added) <= longest_s
        ]
        if with_room and not found:
            found = [min(with_room, key=step_s)]
        if self._is_late(found, demand):
            return NoPlacement.LATE
        prefill = self._choose_prefill(found, demand)
        if isinstance(prefill, NoPlacement):
            return prefill
        return ElasticPlacement(prefill, self._decode(_of(found, prefill.worker), demand))

    def soonest(
        self, match: PrefixMatch, num_tokens: int, session: SessionKey | None
    ) -> PrefillChoice | None:
        """Returns where the first token of a prompt would come soonest; None: there is no worker.

        Unlike `place`, this method has no limit of the prompts that are queued on the worker.
        """
        candidates = self._candidates(
            match, Demand(num_tokens, 0, 0, math.inf, math.inf, session=session)
        )
        return min(
            (candidate.soonest for candidate in candidates),
            key=lambda choice: choice.predicted_s,
            default=None,
        )

    def candidates(
        self, match: PrefixMatch, session: SessionKey | None
    ) -> list[tuple[WorkerLoad, HeldPrefix]]:
        """Workers that a placement in an elastic cell compares.

        Returns:
            The workers of the least loaded group that get work, the workers with the longest
            prefixes, the session's last workers, and the workers with most KV room and with the
            shortest prefill queue. With each, the prefix that it holds.
        """
        loads = self._router.loads
        group = loads.least_loaded_group()
        found = {entry.key: entry for entry in group if loads.pool(entry.key) is not None}
        if loads.num_groups > 1:
            last = self._router.last_of(session)
            holders = match.holders(NUM_HOLDERS, loads.open_prefill | loads.open_decode)
            # The group with the fewest requests may have no room, if its requests are long.
            emptiest, idlest = loads.by_room.least(), loads.by_queue.least()
            for worker in (*holders, last.prefill, last.decode, emptiest, idlest):
                entry = loads.get(worker)
                if entry is not None and loads.pool(entry.key) is not None:
                    found[entry.key] = entry
        return [(entry, match.held_by(worker)) for worker, entry in found.items()]

    def _candidates(self, match: PrefixMatch, demand: Demand) -> list[_Candidate]:
        found = self.candidates(match, demand.session)
        candidates = [
            _Candidate(load, held, self._prefill(load, held, demand), None) for load, held in found
        ]
        sources = self._fetches.sources(match) if demand.may_fetch else {}
        if not sources:
            return candidates
        # Only the workers that would compute the whole prompt soonest are compared with a fetch,
        # because they are likely to compute the rest soonest.
        soonest = nsmallest(
            _NUM_FETCHING, range(len(found)), key=lambda at: candidates[at].prefill.predicted_s
        )
        for at in soonest:
            candidate = candidates[at]
            fetch = self._prefill_with_fetch(
                match, sources, candidate.load, candidate.prefill, demand
            )
            candidates[at] = candidate._replace(fetch=fetch)
        return candidates

    def _is_late(self, candidates: list[_Candidate], demand: Demand) -> bool:
        """Whether others go before the request because no candidate would be in time."""
        soonest_s = min((candidate.soonest.predicted_s for candidate in candidates), default=0.0)
        is_late = demand.others_go_first_if_late and demand.due_in_s < soonest_s
        if is_late:
            self._prompts.was_late(self._router.now)
        return is_late

    @property
    def _targets(self) -> StepTargets:
        targets = self._router.step_targets
        assert targets is not None
        return targets

    # ---- Prefill worker

    def _choose_prefill(
        self, candidates: list[_Candidate], demand: Demand
    ) -> PrefillChoice | NoPlacement:
        """Returns the best prefill worker, or why the request waits for it."""
        now = self._router.now
        small = 0.0
        if demand.must_place and candidates:
            works = sorted(candidate.prefill.num_work_tokens for candidate in candidates)
            small = _SMALL_SHARE * works[len(works) // 2]
        # A late prompt must not borrow time from streams, because prompts in time need that time.
        needs_no_decodes = demand.is_late and self._targets.may_borrow
        best: PrefillChoice | None = None
        best_cost_s, ahead_s = math.inf, 0.0
        # Least cost of a worker that lacks only KV room.
        full_cost_s = math.inf
        for candidate in candidates:
            load = candidate.load
            # A prompt takes KV room and a place in the engine's batch too.
            has_room = self._has_room(load, demand.num_tokens)
            if not self._router.takes_prompts(load):
                continue
            if demand.waits_for_others and (
                load.num_prefills
                or load.prompt_speed < _LATE_SPEED
                or (needs_no_decodes and load.num_decodes)
            ):
                continue
            for choice in candidate.choices:
                if (
                    demand.must_place
                    and not demand.continues
                    and load.has_late_request(now)
                    and choice.num_work_tokens > small
                ):
                    # A worker gets no second late request. Otherwise, in a cell beyond its
                    # capacity, late requests would take the places of requests that can be in time,
                    # and would hold KV room while the engine computes other prompts first. A prompt
                    # whose prefix only this worker holds is an exception, because computing the
                    # whole prompt elsewhere would delay more prompts.
                    continue
                cost_s = choice.predicted_s + self._harm_s(load, choice, demand)
                if choice.predicted_s > demand.due_in_s:
                    cost_s += _TOO_LATE_S
                if not has_room:
                    if demand.continues or (
                        self._ahead_s(load, choice.num_work_tokens, demand) < AHEAD_S
                    ):
                        full_cost_s = min(full_cost_s, cost_s)
                    continue
                if cost_s < best_cost_s:
                    best, best_cost_s = choice, cost_s
                    ahead_s = self._ahead_s(load, choice.num_work_tokens, demand)
        # If the best worker's queue is too long, no other worker is taken instead: the comparison
        # included this queue, and the other workers would still be later.
        if best is not None and (ahead_s < AHEAD_S or demand.continues):
            return best
        # If the best worker has room and only its queue is too long, more KV room would not help,
        # and batch outputs must not be parked for it (core/dispatch.py).
        is_full = not candidates or full_cost_s < best_cost_s
        return NoPlacement.FULL if is_full else NoPlacement.BUSY

    def _harm_s(self, load: WorkerLoad, choice: PrefillChoice, demand: Demand) -> float:
        """Seconds that are added to a prompt's predicted first token to compare workers.

        The worker is busy for the prompt's work, and longer prompts, which it computes later, each
        wait for this work. Beside streams, two parts are added. The first token comes at the end of
        a step, half a step and at least one step after the prompt's turn. The streams get a longer
        step; simulations with one step for this had more requests within both targets than with
        none, half a step or two steps. These parts are not in the prediction itself: with them,
        more prompts counted as late, and fewer were in time.
        """
        num_tokens, work_s, now = choice.num_work_tokens, choice.work_s, self._router.now
        num_behind = load.num_behind(num_tokens, now, is_batch=demand.is_batch)
        alone_s = work_s * load.prompt_speed
        steps_s = 0.0
        if load.num_decodes:
            step_s = load.mean_itl_s()
            steps_s = step_s / 2 + max(0.0, step_s + alone_s - work_s) + step_s
        return _WORK_WEIGHT * alone_s + num_behind * work_s + steps_s

    def _ahead_s(self, load: WorkerLoad, num_tokens: int, demand: Demand) -> float:
        """Seconds of prompts that a worker computes before this many tokens of the request."""
        return load.ahead_s(num_tokens, self._router.now, is_batch=demand.is_batch)

    def _prefill_at_decode(
        self,
        candidates: list[_Candidate],
        prefill: PrefillChoice,
        decode: DecodeChoice,
        demand: Demand,
    ) -> PrefillChoice:
        """Returns the decode worker for the prompt if the first token is in time there.

        Otherwise returns `prefill`. Without a handoff, the first gap is about one step shorter.
        """
        candidate = _of(candidates, decode.worker)
        here = candidate.soonest
        if (
            not self._router.takes_prompts(candidate.load)
            or self._ahead_s(candidate.load, here.num_work_tokens, demand) >= AHEAD_S
            or here.predicted_s > demand.due_in_s
        ):
            return prefill
        return here

    def _decode_at_prefill(
        self,
        candidates: list[_Candidate],
        prefill: PrefillChoice,
        decode: DecodeChoice,
        demand: Demand,
    ) -> DecodeChoice:
        """Returns the prefill worker for the output if it might miss its ITL target by a handoff.

        Otherwise returns `decode`.
        """
        if prefill.worker == decode.worker:
            return decode
        candidate = _of(candidates, prefill.worker)
        load = candidate.load
        is_tight = load.single_step_s > _TIGHT_SHARE * demand.itl_s
        has_few = demand.num_output_tokens <= (_FEW_TOKENS_TIGHT if is_tight else _FEW_TOKENS)
        if has_few and not load.num_prefills:
            longest_s = demand.itl_s
        elif is_tight and not load.num_decodes and not demand.waits_for_others:
            others = (other.load for other in candidates if other is not candidate)
            if sum(not (other.num_decodes or other.num_prefills) for other in others) < _NUM_IDLE:
                return decode
            # Workers with other hardware may decode more slowly.
            longest_s = decode.predicted_s
        else:
            return decode
        if not self._has_room(load, demand.num_tokens + demand.num_output_tokens):
            return decode
        here = self._decode(candidate, demand)
        return here if here.predicted_s <= longest_s else decode

    def _prefill(self, load: WorkerLoad, held: HeldPrefix, demand: Demand) -> PrefillChoice:
        size = load.traits.block_size_tokens
        # The last token is always computed, because the next token is sampled from its logits.
        hits = load.traits.hits(held, (demand.num_tokens - 1) // size * size)
        num_new = demand.num_tokens - hits.num_tokens
        work_s = load.prompt_work_s(num_new, self._router.now)
        load_s = load.load_s(hits, self._router.now)
        wait_s = self._ahead_s(load, num_new, demand) + load_s
        return PrefillChoice(load.key, wait_s + work_s, work_s, num_new, hits)

    def _prefill_with_fetch(
        self,
        match: PrefixMatch,
        sources: Mapping[WorkerKey, HeldPrefix],
        load: WorkerLoad,
        own: PrefillChoice,
        demand: Demand,
    ) -> PrefillChoice | None:
        """Returns a prefill worker with a fetch; None: no worker holds more of the prompt.

        Args:
            match: prefix match of the prompt.
            sources: workers that the prompt's beginning may be fetched from.
            load: load of the prefill worker.
            own: the same worker without the fetch.
            demand: needs of the request.
        """
        fetch = self._fetches.best(match, sources, load, demand.num_tokens, own.hits)
        if fetch is None:
            return None
        num_new = demand.num_tokens - fetch.num_tokens
        choice = self._fetches.choice(own, fetch, load.prompt_work_s(num_new, self._router.now))
        # The prompt is fetched while the worker computes the prompts ahead of it.
        wait_s = max(self._ahead_s(load, num_new, demand), fetch.fetch_s)
        return choice._replace(predicted_s=wait_s + choice.work_s)

    # ---- Decode worker

    def _choose_decode(self, candidates: list[_Candidate], demand: Demand) -> DecodeChoice | None:
        """Returns the best decode worker; None: no worker has room within the ITL target."""
        added = demand.num_mean_tokens
        fastest_s = _fastest_step_s(candidates)
        itl_s = reachable_itl_s(demand.itl_s, fastest_s)
        longest_s = self._longest_step_s(demand, fastest_s)
        # With a limit of 0, every worker counts as needed, so the decodes are spread over all.
        shares = self._targets.shares_workers(fastest_s)
        limit_s = 0.0 if shares else itl_s * self._join_share(candidates, added)
        with_decodes = sorted(
            (candidate for candidate in candidates if candidate.load.num_decodes),
            key=lambda one: -one.load.mean_itl_s(),
        )
        others = [candidate for candidate in candidates if not candidate.load.num_decodes]
        # Seconds of a step that the decodes need beyond the base of each worker that holds some.
        left_s = sum(one.load.mean_itl_s() - one.load.single_step_s for one in with_decodes)
        if with_decodes:
            fullest = with_decodes[0].load
            left_s += fullest.mean_itl_s(1, added) - fullest.mean_itl_s()
        best: _Candidate | None = None
        # The kind of choice comes first in the cost. Kinds, the best first:
        # 0: a worker that is needed for the present decodes; the one with the shortest steps;
        # 1: another worker with decodes; the one with the longest steps;
        # 2: a worker without decodes; the one with the shortest prefill queue;
        # 3: a worker whose steps become longer than limit_s; the one with the shortest steps;
        # 4: a worker whose batch outputs must be parked; core/dispatch.py then parks them.
        best_cost = math.inf, math.inf
        for candidate in (*with_decodes, *others):
            load = candidate.load
            step_s = load.mean_itl_s(1, added)
            is_needed = left_s > 0
            if load.num_decodes:
                left_s -= limit_s - load.single_step_s
            if not self._has_room(load, demand.num_tokens + demand.num_output_tokens):
                continue
            if not load.num_decodes:
                cost = 2.0, load.queued_s(self._router.now)
            elif step_s <= limit_s:
                cost = (0.0, step_s) if is_needed else (1.0, -step_s)
            elif step_s <= longest_s or demand.must_place:
                cost = 3.0, step_s
            elif not demand.is_batch and load.mean_itl_after_parking_s(1, added) <= itl_s:
                cost = 4.0, step_s
            else:
                continue
            if cost < best_cost:
                best, best_cost = candidate, cost
        return self._decode(best, demand) if best is not None else None

    def _longest_step_s(self, demand: Demand, fastest_s: float) -> float:
        """Longest decode step for which a request is placed, unless it must be placed.

        Args:
            demand: needs of the request.
            fastest_s: the fastest candidate's step with one decode.
        """
        itl_s = reachable_itl_s(demand.itl_s, fastest_s)
        if not demand.is_batch:
            return itl_s
        # Beside interactive outputs, batch outputs join only with a margin. Otherwise they would be
        # parked and placed again all the time.
        return itl_s * _JOIN_SHARE if self._router.num_interactive else math.inf

    def _join_share(self, candidates: list[_Candidate], num_tokens: int) -> float:
        """Share of the ITL target that a step may take after a decode of `num_tokens` joins."""
        now, loads = self._router.now, (candidate.load for candidate in candidates)
        # Prompts of less than a step share the next step with the new prompt.
        busy = all(
            load.queued_s(now) > load.single_step_s
            for load in loads
            if load.prompt_speed > _FAST_SPEED
        )
        self._pressure += (busy - self._pressure) * _PRESSURE_WEIGHT
        idle = [one for one in candidates if not (one.load.num_decodes or one.load.num_prefills)]
        has_spare = len(idle) >= _NUM_SPARE and self._pressure < _SPARE_PRESSURE
        if has_spare or self._prompts_can_wait(candidates, num_tokens):
            return _SPREAD_SHARE
        tight = min(1.0, self._pressure * _PRESSURE_GAIN)
        return _JOIN_SHARE + tight * (_JOIN_SHARE_UNDER_PRESSURE - _JOIN_SHARE)

    def _prompts_can_wait(self, candidates: list[_Candidate], num_tokens: int) -> bool:
        """Whether the worker with the shortest steps computes prompts soon enough beside decodes.

        Args:
            candidates: The workers to compare.
            num_tokens: KV tokens of the decode that joins.
        """
        loads = self._router.loads
        num_workers = (loads.open_prefill | loads.open_decode).bit_count()
        needed = self._prompts.needed_speed(num_workers, self._router.now)
        emptiest = min((candidate.load for candidate in candidates), key=WorkerLoad.mean_itl_s)
        if emptiest.prompt_speed < needed:
            return False
        # The first decode of a worker lowers its speed of prompts; further decodes hardly do.
        return (
            emptiest.num_decodes > 0 or emptiest.speed_with_one(self._targets, num_tokens) >= needed
        )

    def _has_room(self, load: WorkerLoad, num_tokens: int) -> bool:
        """Whether a worker has room for this many KV tokens; one without decodes always has."""
        needed = load.in_blocks(num_tokens)
        return self._router.takes_decodes(load) and (
            needed <= load.free_tokens or not load.num_decodes
        )

    @staticmethod
    def _decode(candidate: _Candidate, demand: Demand) -> DecodeChoice:
        load = candidate.load
        return DecodeChoice(
            load.key,
            predicted_s=load.mean_itl_s(1, demand.num_mean_tokens),
            num_kv_tokens=load.in_blocks(demand.num_tokens + demand.num_output_tokens),
            num_tokens=demand.num_tokens,
            hits=load.traits.hits(candidate.held, demand.num_tokens),
        )


def reachable_itl_s(itl_s: float, fastest_s: float) -> float:
    """Returns the longest step that requests are placed for, in seconds.

    Args:
        itl_s: ITL target.
        fastest_s: The fastest worker's step with one decode. If it takes longer than the target, no
            worker can keep the target, and requests must not wait for it.
    """
    return itl_s if fastest_s <= itl_s else _UNREACHABLE * fastest_s


def _of(candidates: list[_Candidate], worker: WorkerKey) -> _Candidate:
    """Returns the candidate that is this worker."""
    return next(candidate for candidate in candidates if candidate.load.key == worker)


def _fastest_step_s(candidates: list[_Candidate]) -> float:
    """Seconds of a decode step with one stream on the fastest candidate."""
    return min(candidate.load.single_step_s for candidate in candidates)
