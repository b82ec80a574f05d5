"""The choices of workers for the workers of one router."""

from __future__ import annotations

from baton.coordinator.routing.cache_fills import CacheFills
from baton.coordinator.routing.elastic_candidates import ElasticCandidates
from baton.coordinator.routing.elastic_choices import ElasticChoices
from baton.coordinator.routing.pool_choices import PoolChoices
from baton.coordinator.routing.prefix_fetches import PrefixFetches
from baton.coordinator.routing.prompt_demand import PromptDemand
from baton.coordinator.routing.router import Router


def pool_choices(router: Router, *, fetches: bool = True) -> PoolChoices:
    return PoolChoices(router, PrefixFetches(router, enabled=fetches))


def elastic_choices(
    router: Router, *, fetches: bool = True, prompts: PromptDemand | None = None
) -> ElasticChoices:
    candidates = ElasticCandidates(router, PrefixFetches(router, enabled=fetches))
    return ElasticChoices(router, candidates, prompts or PromptDemand(), CacheFills())
