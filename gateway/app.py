"""The gateway's HTTP routes."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton import __version__
from baton.gateway import body_reader, error_responses
from baton.gateway.anthropic_route import COUNT_TOKENS, Messages, count_tokens
from baton.gateway.batches import BATCHES, FILES
from baton.gateway.batches.database import Database
from baton.gateway.caller_slots import CallerSlots
from baton.gateway.cells import Cells
from baton.gateway.client_disconnect import until_disconnect
from baton.gateway.coordinator_queries import QueryLimiter
from baton.gateway.dashboard.routes import DASHBOARD, DashboardRoutes
from baton.gateway.dialect import Dialect
from baton.gateway.error_responses import CLIENT_CLOSED_REQUEST, HttpError
from baton.gateway.generation import Generation
from baton.gateway.metrics import GatewayCollector, GatewayStats
from baton.gateway.metrics_auth import MetricsAuth
from baton.gateway.model_routes import MODELS, ModelRoutes
from baton.gateway.openai_dialects import Chat, Completions
from baton.gateway.pooling_route import POOLING_ROUTES, PoolingRoute
from baton.gateway.response_store import ResponseStore
from baton.gateway.responses_route import RESPONSES, Responses
from baton.gateway.route_table import RouteTable
from baton.gateway.tokenize_routes import TokenizeRoutes
from baton.runtime.config import HttpConfig
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.security_config import SecurityConfig

if TYPE_CHECKING:
    from baton.gateway.batches.runner import BatchRunner
    from baton.gateway.pooling_servers import PoolingServers

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
        responses = Responses(
            config.max_body_bytes, ResponseStore(config.stored_responses_bytes), cells
        )
        messages = Messages(config.max_body_bytes)
        # The APIs of the generation routes.
        dialects: tuple[Dialect, ...] = (Completions(), Chat(), messages, responses)
        self.stats = GatewayStats(tuple(one.path for one in dialects), cells.failovers)
        self.pooling = _pooling_servers(config, self.stats)
        self.refusals = Refusals()
        self._metrics_auth = MetricsAuth(security or SecurityConfig(), self.refusals)
        self._slots = slots = CallerSlots(config.max_running_requests, "requests", "gateway_full")
        self._registry = GatewayCollector(self.stats, slots).registry()
        self._registry.register(self.refusals)
        self._bodies = bodies = body_reader.BodyReader(config)
        self._cells = cells
        tokenizing = TokenizeRoutes(cells)
        self._generations = {
            one.path: Generation(one, cells, config, bodies, self.stats, slots) for one in dialects
        }
        self.batches: BatchRunner | None = None
        batch_routes = _batches_off()
        if database is not None:
            # The openai package takes a second and 30 MB.
            from baton.gateway.batches.routes import BatchRoutes
            from baton.gateway.batches.runner import BatchRunner

            stats = self.stats.batches
            self.batches = BatchRunner(database, self._generations, config, stats, clock)
            batch_routes = BatchRoutes(self.batches, cells, config, bodies).table()
        pooling_models = self.pooling.models if self.pooling is not None else ()
        # Names in the metrics, and the routes that are counted by this name.
        tables: list[tuple[str, RouteTable]] = [
            (MODELS, ModelRoutes(cells, pooling_models).table()),
            (FILES, [one for one in batch_routes if one[0].startswith(FILES)]),
            (BATCHES, [one for one in batch_routes if one[0].startswith(BATCHES)]),
            (DASHBOARD, DashboardRoutes(cells, query_limiter).table()),
        ]
        self._other_routes = Starlette(
            routes=[
                *(
                    Route(route, generation, methods=["POST"])
                    for route, generation in self._generations.items()
                ),
                *(
                    Route(
                        route,
                        PoolingRoute(route, self.pooling, cells, bodies, self.stats, slots),
                        methods=["POST"],
                    )
                    for route in POOLING_ROUTES
                ),
                Route("/health", self._counted("/health", self._health)),
                # vLLM has /ping for SageMaker. Metrics count it as /health.
                Route("/ping", self._counted("/health", self._health), methods=["GET", "POST"]),
                Route("/version", self._counted("/version", self._version)),
                *(
                    Route(route, self._counted(route, self._with_body(answer)), methods=["POST"])
                    for route, answer in (
                        ("/tokenize", tokenizing.tokenize),
                        ("/detokenize", tokenizing.detokenize),
                    )
                ),
                Route(
                    f"{RESPONSES}/{{id}}",
                    self._counted(RESPONSES, responses.stored),
                    methods=["GET", "DELETE"],
                ),
                Route(
                    "/tokenizer_info",
                    self._counted("/tokenizer_info", partial(_tokenizer_info, tokenizing)),
                ),
                Route(
                    COUNT_TOKENS,
                    self._counted(
                        COUNT_TOKENS,
                        self._with_body(count_tokens(tokenizing.tokenize)),
                        partial(_dialect_response, messages),
                    ),
                    methods=["POST"],
                ),
                Route("/metrics", self._counted("/metrics", self._metrics)),
                *(
                    Route(path, self._counted(name, answer), methods=methods)
                    for name, table in tables
                    for path, answer, methods in table
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

    def _counted(
        self,
        route: str,
        answer: Callable[[Request], Awaitable[Response]],
        error_response: Callable[[HttpError], Response] | None = None,
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wraps an endpoint: turns errors into error responses and counts the request.

        Args:
            route: The route's name in the metrics.
            answer: The endpoint.
            error_response: Makes the response of an error; None: in OpenAI's form.
        """
        as_response = error_response or _response

        async def endpoint(request: Request) -> Response:
            try:
                response = await answer(request)
            except HttpError as problem:
                response = as_response(problem)
            except body_reader.ClientDisconnected:
                response = Response(status_code=CLIENT_CLOSED_REQUEST)
            except Exception:
                _log.exception("%s failed", route)
                response = as_response(error_responses.internal_error())
            self.stats.requests[route, response.status_code] += 1
            return response

        return endpoint

    async def _health(self, request: Request) -> Response:
        await self._cells.ready()
        return Response(status_code=200)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    def _with_body(
        self, answer: Callable[[bytes, Mapping[str, str]], Awaitable[dict[str, object]]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wraps an endpoint that reads a JSON body; it ends when the client leaves."""

        async def endpoint(request: Request) -> Response:
            body = await self._bodies.read(request.receive, request.headers)
            answering = answer(body, request.headers)
            return JSONResponse(await until_disconnect(answering, request.receive))

        return endpoint

    async def _metrics(self, request: Request) -> Response:
        self._metrics_auth.check(request.headers, request.client.host if request.client else "")
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _no_route(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self.stats.requests["other", error.status_code] += 1
        message = f"{request.method} {request.url.path}: {error.detail}"
        kind = _ERROR_KINDS.get(error.status_code, error_responses.INVALID_REQUEST)
        problem = HttpError(error.status_code, message, kind=kind, code="no_such_route")
        return _response(problem, error.headers)


def _pooling_servers(config: HttpConfig, stats: GatewayStats) -> PoolingServers | None:
    """Returns the servers of pooling models; None: none is configured."""
    if not config.pooling:
        return None
    # The HTTP client takes a third of a second to import.
    from baton.gateway.pooling_servers import PoolingServers

    return PoolingServers(config.pooling, stats)


def _batches_off() -> RouteTable:
    """Returns path, endpoint and methods of the routes of files and batches, which refuse."""

    async def refuse(request: Request) -> Response:
        message = (
            "this gateway keeps no files and batches: set http.batches.dir to a directory for them"
        )
        raise HttpError(501, message, kind="server_error", code="batches_off", permanent=True)

    methods = ["GET", "POST", "DELETE"]
    return [
        (path, refuse, methods)
        for route in (FILES, BATCHES)
        for path in (route, f"{route}/{{rest:path}}")
    ]


async def _tokenizer_info(tokenizing: TokenizeRoutes, request: Request) -> Response:
    return JSONResponse(await tokenizing.info(request.headers))


def _dialect_response(dialect: Dialect, problem: HttpError) -> Response:
    """Returns an error response in the form of another API."""
    kind = body_reader.response_class(problem.status)
    body = dialect.error_body(problem, "")
    response = kind(body, problem.status, media_type="application/json")
    response.raw_headers += problem.headers()
    return response


def _response(problem: HttpError, headers: Mapping[str, str] | None = None) -> Response:
    found = {name.decode(): value.decode() for name, value in problem.headers()}
    kind = body_reader.response_class(problem.status)
    return kind(
        problem.body(),
        problem.status,
        {**(headers or {}), **found},
        media_type="application/json",
    )
