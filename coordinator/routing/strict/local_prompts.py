"""Conditional disaggregation: decides when a decode worker computes a prompt itself.

A decode worker computes a prompt if it finishes much sooner than a prefill worker would, and if
the longer step does not slow down its running requests too much.
"""

from __future__ import annotations

from baton.coordinator.routing.choices import DecodeChoice, Placement, PrefillChoice
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.prefixes.prefix_match import PrefixMatch
from baton.coordinator.state.lanes import Lane
from baton.v1 import common_pb2

# The decode worker computes a prompt only if it needs at most this share of the prefill worker's
# time, because the prompt slows down the requests that the decode worker runs.
_LOCAL_SHARE = 0.7
# For an interactive prompt, this share of the gaps of a running request may exceed the ITL target.
_LONG_GAPS_SHARE = 0.05
# Longest allowed gap, as a multiple of the ITL target.
_LONGEST_GAP = 2.0


class LocalPrompts:
    """Decides when a decode worker computes a prompt, and counts the long gaps this causes.

    Args:
        view: View of one fleet's workers.
        itl_target_s: Target for the gap between tokens of an interactive request, in seconds.
    """

    def __init__(self, view: FleetView, itl_target_s: float) -> None:
        self._view, self._itl_target_s = view, itl_target_s

    def may_pay(self, num_tokens: int, match: PrefixMatch, there_s: float) -> bool:
        """Whether any decode worker could be sooner than the prefill worker; a cheap first check.

        Args:
            num_tokens: tokens of the prompt and of the output generated so far.
            match: the prefix of the prompt that each worker holds.
            there_s: seconds that a prefill worker needs, including its queue.
        """
        held = self._view.longest_decode(match)
        least_s = min(
            latency.prefill_s(max(1, num_tokens - held.num_total * block_size))
            for latency, block_size in self._view.loads.kinds
        )
        return least_s <= there_s * _LOCAL_SHARE

    def placed(self, decode: DecodeChoice) -> Placement:
        """Returns the placement of a request whose decode worker computes the prompt."""
        entry = self._view.loads.entries[decode.worker]
        num_new = max(1, decode.num_tokens - decode.hits.num_tokens)
        work_s = entry.traits.latency.prefill_s(num_new)
        load_s = entry.tier_load_s(decode.hits, self._view.now)
        prefill = PrefillChoice(
            decode.worker,
            _outputs_step_s(entry) + load_s + work_s,
            work_s,
            num_new,
            decode.hits,
        )
        return Placement(prefill, decode)

    def pays(self, choice: PrefillChoice, there_s: float, lane: Lane) -> bool:
        """Whether a decode worker should compute a prompt itself.

        It should if it is sooner than the prefill worker, and if its running requests tolerate the
        longer step.

        Args:
            choice: the decode worker, as `placed` returns it.
            there_s: seconds that a prefill worker needs, including its queue.
            lane: lane of the request.
        """
        entry = self._view.loads.entries[choice.worker]
        return choice.ttft_s <= there_s * _LOCAL_SHARE and self._tolerates(
            entry, _longest_step_s(entry, choice), lane
        )

    def begins(self, choice: PrefillChoice) -> None:
        """Counts the long gaps that a decode worker's requests get from the prompt it starts."""
        entry = self._view.loads.entries[choice.worker]
        if self._exceeds_target(entry, _longest_step_s(entry, choice)):
            entry.record_long_gaps(choice.num_work_tokens, _LONG_GAPS_SHARE, self._view.now)

    def _tolerates(self, entry: WorkerLoad, step_s: float, lane: Lane) -> bool:
        """Whether a worker's interactive requests tolerate a step of this length for this lane."""
        return not self._exceeds_target(entry, step_s) or (
            lane != common_pb2.LANE_BATCH
            and step_s <= self._itl_target_s * _LONGEST_GAP
            and entry.next_long_gap_at <= self._view.now
        )

    def _exceeds_target(self, entry: WorkerLoad, step_s: float) -> bool:
        """Whether a step of this length exceeds the ITL target of an interactive request there."""
        return entry.decodes.num_interactive > 0 and step_s > self._itl_target_s


def _outputs_step_s(entry: WorkerLoad) -> float:
    """Predicted seconds of a decode step with the worker's present requests."""
    return entry.reserved_step_s() if entry.num_decodes else 0.0


def _longest_step_s(entry: WorkerLoad, choice: PrefillChoice) -> float:
    """Predicted seconds of the longest step that computes the prompt next to running decodes."""
    num_tokens = min(choice.num_work_tokens, entry.traits.chunk_tokens)
    return _outputs_step_s(entry) + entry.traits.latency.prefill_s(num_tokens)
