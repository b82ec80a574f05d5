"""Prompts that decode workers compute themselves: conditional disaggregation.

A decode worker does where it is much sooner than a prefill worker would be, and where the outputs
that it decodes can bear the longer step.
"""

from __future__ import annotations

from collections import Counter

from baton.coordinator.routing.choices import DecodeChoice
from baton.coordinator.routing.prefix_index import PrefixMatch
from baton.coordinator.routing.router import Router
from baton.coordinator.routing.worker_load import Latency, WorkerLoad, WorkerTraits
from baton.coordinator.state.lanes import Lane
from baton.v1 import common_pb2

# A prompt is computed by the decode worker when that takes this share of the prefill worker's time
# at most: what it saves must be worth what it costs the outputs there.
_LOCAL_SHARE = 0.7
# A target holds for nearly all gaps of an output. For a person who waits for a prompt this share of
# them may be longer, up to so many times the target.
_LONG_GAPS_SHARE = 0.05
_LONGEST_GAP = 2.0


class LocalPrompts:
    """Says when a decode worker should compute a prompt, and counts what that costs its outputs.

    Args:
        router: Router of one fleet's workers.
        itl_target_s: target of gaps between an interactive output's tokens, in seconds.
    """

    def __init__(self, router: Router, itl_target_s: float) -> None:
        self._router, self._itl_target_s = router, itl_target_s
        # How many workers there are by what prompts cost there and how large their blocks are.
        self._kinds: Counter[tuple[Latency, int]] = Counter()

    def attach(self, traits: WorkerTraits) -> None:
        """A worker of any role has attached."""
        self._kinds[traits.latency, traits.block_size_tokens] += 1

    def detach(self, traits: WorkerTraits) -> None:
        """A worker is gone."""
        kind = traits.latency, traits.block_size_tokens
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]

    def may_pay(self, num_tokens: int, match: PrefixMatch, there_s: float) -> bool:
        """Whether some decode worker might be sooner, whichever is chosen.

        Args:
            num_tokens: how many tokens prompt and known output have.
            match: which workers hold how much of the prompt.
            there_s: how long a prefill worker would need, its queue included.
        """
        held = self._router.longest_decode(match)
        least_s = min(
            latency.prefill_s(max(1, num_tokens - held * block_size))
            for latency, block_size in self._kinds
        )
        return least_s <= there_s * _LOCAL_SHARE

    def pays(self, choice: DecodeChoice, entry: WorkerLoad, there_s: float, lane: Lane) -> bool:
        """Whether a decode worker should compute a prompt: it is sooner, and its outputs bear it.

        Args:
            choice: the decode worker.
            entry: what it has.
            there_s: how long a prefill worker would need, its queue included.
            lane: of the request.
        """
        here_s = _outputs_step_s(entry) + entry.traits.latency.prefill_s(choice.num_new_tokens)
        return here_s <= there_s * _LOCAL_SHARE and self._bear(
            entry, _longest_step_s(entry, choice), lane
        )

    def begins(self, choice: DecodeChoice) -> None:
        """A decode worker begins with a prompt: counts the gap that this makes too long, if any."""
        entry = self._router.load(choice.worker)
        if entry is not None and self._is_felt(entry, _longest_step_s(entry, choice)):
            self._router.hold_up(choice, _LONG_GAPS_SHARE)

    def _bear(self, entry: WorkerLoad, step_s: float, lane: Lane) -> bool:
        """Whether a worker's urgent outputs bear a prompt of a lane that makes a step so long."""
        return not self._is_felt(entry, step_s) or (
            lane != common_pb2.LANE_BATCH
            and step_s <= self._itl_target_s * _LONGEST_GAP
            and entry.held_up_until <= self._router.now
        )

    def _is_felt(self, entry: WorkerLoad, step_s: float) -> bool:
        """Whether a step so long is a gap over the target of an urgent output there."""
        return entry.num_urgent > 0 and step_s > self._itl_target_s


def _outputs_step_s(entry: WorkerLoad) -> float:
    """A step of what is decoded there now."""
    return entry.itl_with_s(0, 0) if entry.num_decodes else 0.0


def _longest_step_s(entry: WorkerLoad, choice: DecodeChoice) -> float:
    """Of the steps there that compute a prompt beside the outputs."""
    num_tokens = min(choice.num_new_tokens, entry.traits.chunk_tokens)
    return _outputs_step_s(entry) + entry.traits.latency.prefill_s(num_tokens)
