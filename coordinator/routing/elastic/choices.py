"""Chooses the workers of an elastic cell: any worker may compute a prompt and decode its output.

All costs are predicted seconds. The rule compares all workers of a small cell
(candidates.py). A large cell is divided into groups; the rule then compares the workers of
the least loaded group, the workers that hold the prompt's prefix, the session's last workers, and
the workers with most KV room and with the shortest prefill queue.

1. The prefill worker (prefill_choices.py) is the one where the first token comes soonest.
   The prediction includes the prompts that the worker computes first, the speed that its decodes
   leave for prompts, prefix hits, and the fetch of a prefix from another worker, which happens
   while the prompt waits. Added to it is the harm to others: longer prompts of that worker, which
   it computes later because of this one, and its streams. Among equal costs, it is the worker that
   stored least in its cache lately (cache_fills.py).
2. The decode worker (decode_choices.py): each worker that decodes pays the base time of a
   decode step, and computes prompts at a fraction of its speed. The rule therefore spreads the
   decodes evenly over the smallest number of workers that keep the ITL target. The other workers
   finish their decodes, and then compute prompts at full speed. There are two exceptions:
   - If prompts are few and short, workers with decodes compute them soon enough. The decodes are
     then spread over more workers, before steps come close to the target. They are also spread
     while several workers are idle.
   - If gaps may be long (core/gap_choice.py) and a step with one stream takes most of the ITL
     target, workers without decodes would leave the other workers no time for prompts. The decodes
     are then spread over all workers.
   Outputs that wait for long prompts count for less (waiting_outputs.py). Workers of a kind on
   which a decode costs the prompts much more time than on another kind come after the others.
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

from typing import NamedTuple

from baton.coordinator.routing.choices import (
    DecodeChoice,
    NoPlacement,
    PlacementSample,
    PrefillChoice,
)
from baton.coordinator.routing.elastic.cache_fills import CacheFills
from baton.coordinator.routing.elastic.candidates import (
    Candidate,
    Demand,
    ElasticCandidates,
    ahead_s,
    fastest_step_s,
    step_targets,
)
from baton.coordinator.routing.elastic.decode_choices import (
    ElasticDecodeChoices,
    decode_choice,
    placement_sample,
)
from baton.coordinator.routing.elastic.prefill_choices import AHEAD_S, ElasticPrefillChoices
from baton.coordinator.routing.elastic.prompt_demand import PromptDemand
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.prefixes.prefix_match import PrefixMatch
from baton.coordinator.state.requests import SessionKey, WorkerKey

# A handoff makes an output's first gap about one step longer, so that outputs of few tokens miss
# the ITL target. If a step takes more than this share of the target, the prefill worker decodes any
# output while this many other workers are idle. In simulations, smaller shares and fewer idle
# workers delayed prompts by more than outputs gained.
_TIGHT_SHARE, _NUM_IDLE = 0.8, 2
# The prefill worker decodes outputs of at most this many tokens, unless it computes other prompts,
# which the decode would slow down. The second number applies if steps take more than _TIGHT_SHARE.
# Larger numbers delayed prompts by more than outputs gained.
_FEW_TOKENS, _FEW_TOKENS_TIGHT = 4, 8


class ElasticPlacement(NamedTuple):
    """The worker that computes a prompt, and the one that decodes its output.

    Attributes:
        prefill: where the prompt is computed.
        decode: where the output is decoded; None: the request ends with its first token.
        sample: state of the cell, for `ElasticChoices.begins`; None: there is nothing to learn.
    """

    prefill: PrefillChoice
    decode: DecodeChoice | None
    sample: PlacementSample | None = None


class ElasticChoices:
    """Chooses workers of one fleet for requests.

    Args:
        view: View of the fleet's workers, with step targets.
        candidates: Finds the workers that are compared.
        prompts: Recent prompts, which the owner adds.
        cache_fills: What workers stored in their caches, which the owner adds.
    """

    def __init__(
        self,
        view: FleetView,
        candidates: ElasticCandidates,
        prompts: PromptDemand,
        cache_fills: CacheFills,
    ) -> None:
        self._view, self._candidates = view, candidates
        self._prefill_choices = ElasticPrefillChoices(view, prompts, cache_fills)
        self._decode_choices = ElasticDecodeChoices(view, prompts)

    def place(self, match: PrefixMatch, demand: Demand) -> ElasticPlacement | NoPlacement:
        """Returns the workers for a request, or why it waits."""
        candidates = self._candidates.of(match, demand)
        if _is_late(candidates, demand):
            return NoPlacement.LATE
        prefill = self._prefill_choices.choose(candidates, demand)
        if isinstance(prefill, NoPlacement):
            return prefill
        if not demand.num_output_tokens:
            return ElasticPlacement(prefill, None)
        decode = self._decode_choices.choose(candidates, demand, prefill)
        if decode is None:
            return NoPlacement.FULL
        sample = placement_sample(candidates, demand, prefill, self._view.now)
        shares = step_targets(self._view).shares_workers(fastest_step_s(candidates))
        if shares and prefill.worker != decode.worker and not demand.yields:
            prefill = self._prefill_at_decode(candidates, prefill, decode, demand)
        return ElasticPlacement(
            prefill, self._decode_at_prefill(candidates, prefill, decode, demand), sample
        )

    def begins(self, sample: PlacementSample) -> None:
        """Learns from the placement of a request that begins."""
        self._decode_choices.begins(sample)

    def place_on_one(self, match: PrefixMatch, demand: Demand) -> ElasticPlacement | NoPlacement:
        """Returns one worker for both parts of a request without a handoff, or why it waits.

        The caller has called `place`, which returned two workers. The worker is the best prefill
        worker among those that keep the ITL target with this output. If there is none, it is the
        worker with the shortest decode steps; for an interactive request, after the batch outputs
        there are parked.
        """

        def step_s(one: Candidate) -> float:
            load = one.load
            # Only interactive requests let batch outputs be parked (core/dispatch.py).
            if demand.is_batch:
                return load.mean_step_s(1, added)
            return load.mean_step_after_parking_s(1, added)

        candidates = self._candidates.of(match, demand)
        num_tokens, added = demand.num_tokens + demand.num_output_tokens, demand.num_mean_tokens
        longest_s = self._decode_choices.longest_step_s(demand, fastest_step_s(candidates))
        with_room = [one for one in candidates if self._view.has_room(one.load, num_tokens)]
        found = [
            one
            for one in with_room
            if not one.load.num_decodes or one.load.mean_step_s(1, added) <= longest_s
        ]
        if with_room and not found:
            found = [min(with_room, key=step_s)]
        if _is_late(found, demand):
            return NoPlacement.LATE
        prefill = self._prefill_choices.choose(found, demand)
        if isinstance(prefill, NoPlacement):
            return prefill
        return ElasticPlacement(prefill, decode_choice(_of(found, prefill.worker), demand))

    def soonest(
        self, match: PrefixMatch, num_tokens: int, session: SessionKey | None
    ) -> PrefillChoice | None:
        """Returns where the first token of a prompt would come soonest; None: there is no worker.

        Unlike `place`, this method has no limit of the prompts that are queued on the worker.
        """
        candidates = self._candidates.of(match, Demand.of_prompt(num_tokens, session))
        return min(
            (candidate.soonest for candidate in candidates),
            key=lambda choice: choice.ttft_s,
            default=None,
        )

    def _prefill_at_decode(
        self,
        candidates: list[Candidate],
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
            not self._view.takes_prompts(candidate.load)
            or ahead_s(self._view, candidate.load, here.num_work_tokens, demand) >= AHEAD_S
            or here.ttft_s > demand.due_in_s
        ):
            return prefill
        return here

    def _decode_at_prefill(
        self,
        candidates: list[Candidate],
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
        elif is_tight and not load.num_decodes and not demand.yields:
            others = (other.load for other in candidates if other is not candidate)
            if sum(not (other.num_decodes or other.num_prefills) for other in others) < _NUM_IDLE:
                return decode
            # Workers with other hardware may decode more slowly.
            longest_s = decode.step_s
        else:
            return decode
        if not self._view.has_room(load, demand.num_tokens + demand.num_output_tokens):
            return decode
        here = decode_choice(candidate, demand)
        return here if here.step_s <= longest_s else decode


def _is_late(candidates: list[Candidate], demand: Demand) -> bool:
    """Whether others go before the request because no candidate would be in time."""
    soonest_s = min((candidate.soonest.ttft_s for candidate in candidates), default=0.0)
    return demand.others_go_first_if_late and demand.due_in_s < soonest_s


def _of(candidates: list[Candidate], worker: WorkerKey) -> Candidate:
    """Returns the candidate that is this worker."""
    return next(candidate for candidate in candidates if candidate.load.key == worker)
