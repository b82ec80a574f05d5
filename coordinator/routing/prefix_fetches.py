"""Chooses which part of a prompt's beginning a prefill worker fetches, and from which worker.

A fetch costs the wait for its holder, the bytes by measured speed, and the holder's load from host
memory or disk. It pays if the computation that it saves takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from baton.coordinator.routing.choices import Fetch, PrefillChoice
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.prefixes.prefix_match import HeldPrefix, PrefixMatch
from baton.coordinator.state.requests import PromptHits, WorkerKey

# Number of workers from which a prompt's beginning may be fetched, per choice.
_NUM_SOURCES = 2
# Seconds of a fetch beyond the waits and the bytes: messages, and opening the handoff.
_FETCH_BASE_S = 0.005
# Shortest time that a fetch gets before the prompt is computed instead, in seconds.
_LEAST_FETCH_TIMEOUT_S = 0.1


class PrefixFetches:
    """Fetches between the workers of one fleet.

    Args:
        view: View of the fleet's workers.
        enabled: Whether workers may fetch at all.
    """

    def __init__(self, view: FleetView, *, enabled: bool = True) -> None:
        self._view, self._enabled = view, enabled

    def sources(self, match: PrefixMatch) -> dict[WorkerKey, HeldPrefix]:
        """Workers that the beginning of a prompt may be fetched from, with what they hold."""
        if not self._enabled:
            return {}
        loads = self._view.loads
        return match.reported_holders(_NUM_SOURCES, loads.open_prefill | loads.open_decode)

    def best(
        self,
        match: PrefixMatch,
        sources: Mapping[WorkerKey, HeldPrefix],
        entry: WorkerLoad,
        num_tokens: int,
        hits: PromptHits,
    ) -> Fetch | None:
        """The fetch after which a worker has the prompt soonest; None: no other holds more blocks.

        Args:
            match: prefix match of the prompt.
            sources: result of `sources`.
            entry: load of the worker that computes the prompt.
            num_tokens: tokens of the prompt.
            hits: tokens of the prompt that this worker holds.
        """
        traits, now, transfers = entry.traits, self._view.now, self._view.transfers
        size, per_token = traits.block_size_tokens, traits.kv_bytes_per_token
        if not per_token or not traits.sends_prefixes:
            return None
        usable = traits.reusable_tokens(num_tokens)
        best, least = None, math.inf
        for skip, num_own in self._skips(match, entry, hits, usable):
            for key, held in sources.items():
                holder = self._view.loads.entries[key]
                most_bytes = min(holder.traits.max_send_bytes, traits.max_receive_bytes)
                most_tokens = most_bytes // (per_token * size) * size
                end = min(held.num_total * size, usable, skip + most_tokens)
                if key == entry.key or end <= max(skip, hits.num_tokens):
                    continue
                near = holder.traits.is_near(traits)
                num_bytes = (end - skip) * per_token
                sending_s = transfers.seconds((key, entry.key), num_bytes, near=near)
                wait_s = max(transfers.wait_s(key), holder.one_step_s(now))
                load_s = holder.tier_load_s(traits.hits(held, end), now)
                fetch_s = _FETCH_BASE_S + wait_s + load_s + sending_s
                if num_own:
                    # The worker loads its own blocks meanwhile, in a step of its own.
                    own_s = entry.tier_load_s(PromptHits(0, num_own), now) + entry.one_step_s(now)
                    fetch_s = max(fetch_s, own_s)
                total_s = fetch_s + traits.latency.prefill_s(num_tokens - end)
                if total_s < least:
                    least = total_s
                    best = Fetch(key, end, skip, fetch_s, sending_s, host_tokens=num_own)
        return best

    @staticmethod
    def _skips(
        match: PrefixMatch, entry: WorkerLoad, hits: PromptHits, usable: int
    ) -> list[tuple[int, int]]:
        """Prompt tokens that a fetch may leave out because its receiver has them.

        Args:
            match: prefix match of the prompt.
            entry: load of the worker that computes the prompt.
            hits: tokens of the prompt that this worker holds.
            usable: tokens of the prompt that need not be computed; whole blocks.

        Returns:
            Pairs of tokens to leave out, and those of them that are loaded from host memory.
        """
        if not (hits.num_device or hits.num_host):
            return [(0, 0)]
        own, size = match.reported_by(entry.key), entry.traits.block_size_tokens
        on_device = min(own.num_device * size, usable)
        with_host = min(own.num_total * size, usable)
        # A load from disk takes too long to hold the blocks after it in staging meanwhile.
        if with_host == on_device or own.num_disk:
            return [(on_device, 0)]
        return [(on_device, 0), (with_host, with_host - on_device)]

    def choice(self, own: PrefillChoice, fetch: Fetch, work_s: float) -> PrefillChoice:
        """A choice with a fetch instead of what the worker holds itself.

        Args:
            own: the same worker without the fetch.
            fetch: the fetch.
            work_s: seconds of the computation that is left.
        """
        num_held = own.hits.num_tokens
        num_tokens = own.num_work_tokens + num_held
        saved_s = own.work_s - work_s
        timeout_s = max(saved_s, 2 * fetch.fetch_s, _LEAST_FETCH_TIMEOUT_S)
        # A part of the fetch pays if its computation takes longer than the fetch.
        share = min(1.0, fetch.fetch_s / saved_s) if saved_s > 0 else 1.0
        size = self._view.loads.entries[own.worker].traits.block_size_tokens
        least_tokens = num_held + math.ceil((fetch.num_tokens - num_held) * share / size) * size
        return PrefillChoice(
            own.worker,
            fetch.fetch_s + work_s,
            work_s,
            num_tokens - fetch.num_tokens,
            PromptHits(fetch.skip_tokens - fetch.host_tokens, fetch.host_tokens),
            fetch._replace(timeout_s=timeout_s, least_tokens=min(fetch.num_tokens, least_tokens)),
        )
