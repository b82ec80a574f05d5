"""The route /metrics."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from baton.gateway.caller_slots import CallerSlots
from baton.gateway.metrics import GatewayCollector, GatewayStats
from baton.gateway.metrics_auth import MetricsAuth
from baton.gateway.route_table import CountedRoute, RouteTable
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.security_config import SecurityConfig

METRICS = "/metrics"


class MetricsRoute:
    """Serves the gateway's metrics in Prometheus' form.

    Args:
        stats: Counts and latencies of requests.
        slots: Slots of the requests that run on this gateway.
        security: Says who may read the metrics.
        refusals: Counts of refused callers of this process.

    Raises:
        ConfigError: The file of the metrics token cannot be read or has invalid content.
    """

    def __init__(
        self, stats: GatewayStats, slots: CallerSlots, security: SecurityConfig, refusals: Refusals
    ) -> None:
        self._auth = MetricsAuth(security, refusals)
        self._registry = GatewayCollector(stats, slots).registry()
        self._registry.register(refusals)

    def table(self) -> RouteTable:
        """Returns the route."""
        return [CountedRoute(METRICS, self._metrics)]

    async def _metrics(self, request: Request) -> Response:
        self._auth.check(request.headers, request.client.host if request.client else "")
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
