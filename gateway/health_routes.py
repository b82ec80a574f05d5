"""The routes that say whether the gateway serves, and its version."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton import __version__
from baton.gateway.cells import Cells
from baton.gateway.route_table import CountedRoute, RouteTable

HEALTH = "/health"


class HealthRoutes:
    """The routes /health, /ping and /version, compatible with vLLM.

    Args:
        cells: The cells behind the gateway.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def table(self) -> RouteTable:
        """Returns the routes."""
        return [
            CountedRoute(HEALTH, self._health),
            # vLLM has /ping for SageMaker.
            CountedRoute("/ping", self._health, ("GET", "POST"), name=HEALTH),
            CountedRoute("/version", self._version),
        ]

    async def _health(self, request: Request) -> Response:
        await self._cells.ready()
        return Response(status_code=200)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})
