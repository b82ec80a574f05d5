"""Charges tenants for output tokens, and reserves KV room for the next tokens."""

from __future__ import annotations

from baton.coordinator.core.parts import Parts
from baton.coordinator.state.requests import Request

# Number of output tokens of a request that a tenant is charged for at a time.
CHARGE_TOKENS = 16


class TokenCharges:
    """Charges tenants for output tokens that have not been charged yet."""

    def __init__(self, parts: Parts) -> None:
        self._lanes, self._placers = parts.lanes, parts.placers

    def charge(self, request: Request) -> None:
        """Charges the tenant for the tokens since the last charge and reserves KV room for more."""
        self.charge_rest(request)
        self._placers.of(request.fleet).grows(request, CHARGE_TOKENS)

    def charge_rest(self, request: Request) -> None:
        """Charges the tenant for the tokens since the last charge."""
        num_tokens = len(request.token_ids)
        self._lanes.served(request, num_tokens - request.num_charged)
        request.num_charged = num_tokens
