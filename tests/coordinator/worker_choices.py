"""The choices of workers for the workers of one view."""

from __future__ import annotations

from baton.coordinator.routing.elastic.cache_fills import CacheFills
from baton.coordinator.routing.elastic.candidates import ElasticCandidates
from baton.coordinator.routing.elastic.choices import ElasticChoices
from baton.coordinator.routing.elastic.prompt_demand import PromptDemand
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.prefix_fetches import PrefixFetches
from baton.coordinator.routing.strict.pool_choices import PoolChoices


def pool_choices(view: FleetView, *, fetches: bool = True) -> PoolChoices:
    return PoolChoices(view, PrefixFetches(view, enabled=fetches))


def elastic_choices(
    view: FleetView, *, fetches: bool = True, prompts: PromptDemand | None = None
) -> ElasticChoices:
    candidates = ElasticCandidates(view, PrefixFetches(view, enabled=fetches))
    return ElasticChoices(view, candidates, prompts or PromptDemand(), CacheFills())
