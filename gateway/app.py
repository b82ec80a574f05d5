"""The gateway's HTTP routes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton.gateway import body_reader, error_responses
from baton.gateway.anthropic_route import Messages, TokenCounts
from baton.gateway.batches import no_batches
from baton.gateway.batches.database import Database
from baton.gateway.caller_slots import CallerSlots
from baton.gateway.cells import Cells
from baton.gateway.coordinator_queries import QueryLimiter
from baton.gateway.dashboard.routes import DashboardRoutes
from baton.gateway.dialect import Dialect
from baton.gateway.error_responses import CLIENT_CLOSED_REQUEST, HttpError
from baton.gateway.generation import Generation
from baton.gateway.health_routes import HealthRoutes
from baton.gateway.metrics import GatewayStats
from baton.gateway.metrics_route import MetricsRoute
from baton.gateway.model_routes import ModelRoutes
from baton.gateway.openai_dialects import Chat, Completions
from baton.gateway.pooling_route import pooling_routes, pooling_servers
from baton.gateway.response_store import ResponseStore
from baton.gateway.responses_route import Responses
from baton.gateway.route_table import CountedRoute, Endpoint
from baton.gateway.tokenize_routes import TokenizeRoutes
from baton.runtime.config import HttpConfig
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.security_config import SecurityConfig

if TYPE_CHECKING:
    from baton.gateway.batches.runner import BatchRunner

_log = logging.getLogger(__name__)

_ERROR_KINDS = {404: "not_found_error"}


class Gateway:
    """All routes of the gateway, as an ASGI application.

    Args:
        cells: The cells behind the gateway.
        query_limiter: Limits the queries to the coordinators.
        config: Limits of requests.
        security: Says who may read the metrics; None: the default.
        database: Keeps files and batches; None: there are none.
        clock: Returns Unix time in seconds, for files and batches.

    Attributes:
        stats: Counts and latencies of requests, for the metrics.
        refusals: Counts of refused callers of this process, for the metrics.
        batches: Runs batches, once the caller has opened it; None: there are none.
        pooling: Servers of pooling models, once the caller has opened them; None: there are none.
    """

    def __init__(
        self,
        cells: Cells,
        query_limiter: QueryLimiter,
        config: HttpConfig,
        security: SecurityConfig | None = None,
        database: Database | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        bodies = body_reader.BodyReader(config)
        responses = Responses(
            config.max_body_bytes, ResponseStore(config.stored_responses_bytes), cells
        )
        # The APIs of the generation routes.
        dialects: tuple[Dialect, ...] = (
            Completions(),
            Chat(),
            Messages(config.max_body_bytes),
            responses,
        )
        self.stats = stats = GatewayStats([one.path for one in dialects], cells.failovers)
        self.pooling = pooling_servers(config, stats)
        self.refusals = Refusals()
        self._slots = slots = CallerSlots(config.max_running_requests, "requests", "gateway_full")
        self._generations = {
            one.path: Generation(one, cells, config, bodies, stats, slots) for one in dialects
        }
        self.batches: BatchRunner | None = None
        batch_routes = no_batches.table()
        if database is not None:
            # The openai package takes a second and 30 MB.
            from baton.gateway.batches.routes import BatchRoutes
            from baton.gateway.batches.runner import BatchRunner

            self.batches = BatchRunner(database, self._generations, config, stats.batches, clock)
            batch_routes = BatchRoutes(self.batches, cells, config, bodies).table()
        pooling_models = self.pooling.models if self.pooling is not None else ()
        tokenizing = TokenizeRoutes(cells, bodies)
        tables = [
            HealthRoutes(cells).table(),
            tokenizing.table(),
            responses.table(),
            TokenCounts(bodies, tokenizing.tokenize).table(),
            MetricsRoute(stats, slots, security or SecurityConfig(), self.refusals).table(),
            ModelRoutes(cells, pooling_models).table(),
            batch_routes,
            DashboardRoutes(cells, query_limiter).table(),
        ]
        self._other_routes = Starlette(
            routes=[
                *(
                    Route(path, generation, methods=["POST"])
                    for path, generation in self._generations.items()
                ),
                *pooling_routes(self.pooling, cells, bodies, stats, slots),
                *(
                    Route(one.path, self._counted(one), methods=list(one.methods))
                    for table in tables
                    for one in table
                ),
            ],
            exception_handlers={HTTPException: self._no_route},
        )

    @property
    def num_running(self) -> int:
        """Number of generation requests that run."""
        return len(self._slots)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        generation = self._generations.get(scope["path"])
        if generation is not None and scope["method"] == "POST":
            # Bypass Starlette: each of its layers would add a cost per token.
            await generation(scope, receive, send)
        else:
            await self._other_routes(scope, receive, send)

    def _counted(self, route: CountedRoute) -> Endpoint:
        """Wraps an endpoint: turns errors into error responses and counts the request."""
        name = route.name or route.path

        async def endpoint(request: Request) -> Response:
            try:
                response = await route.endpoint(request)
            except HttpError as problem:
                response = _error_response(problem, route.error_body(problem))
            except body_reader.ClientDisconnected:
                response = Response(status_code=CLIENT_CLOSED_REQUEST)
            except Exception:
                _log.exception("%s failed", name)
                failure = error_responses.internal_error()
                response = _error_response(failure, route.error_body(failure))
            self.stats.requests[name, response.status_code] += 1
            return response

        return endpoint

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self.stats.requests["other", error.status_code] += 1
        message = f"{request.method} {request.url.path}: {error.detail}"
        kind = _ERROR_KINDS.get(error.status_code, error_responses.INVALID_REQUEST)
        problem = HttpError(error.status_code, message, kind=kind, code="no_such_route")
        return _error_response(problem, problem.body(), error.headers)


def _error_response(
    problem: HttpError, body: bytes, headers: Mapping[str, str] | None = None
) -> Response:
    kind = body_reader.response_class(problem.status)
    response = kind(body, problem.status, headers, media_type="application/json")
    response.raw_headers += problem.headers()
    return response
