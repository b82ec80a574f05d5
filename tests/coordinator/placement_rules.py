"""The placement rules for the workers of one router."""

from __future__ import annotations

from baton.coordinator.routing.elastic import ElasticRule
from baton.coordinator.routing.prefix_fetches import PrefixFetches
from baton.coordinator.routing.prompt_demand import PromptDemand
from baton.coordinator.routing.router import Router
from baton.coordinator.routing.strict import StrictRule


def strict_rule(router: Router, *, fetches: bool = True) -> StrictRule:
    return StrictRule(router, PrefixFetches(router, enabled=fetches))


def elastic_rule(
    router: Router, *, fetches: bool = True, prompts: PromptDemand | None = None
) -> ElasticRule:
    return ElasticRule(router, PrefixFetches(router, enabled=fetches), prompts or PromptDemand())
