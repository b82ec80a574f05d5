"""Routes of pooling models (embeddings, scores, ranks), forwarded to plain vLLM servers.

A pooling model computes each prompt once and generates no tokens. There is no KV cache to hand
over, so a plain `vllm serve MODEL --runner pooling` serves it as well as a cell would. The gateway
adds what the other routes have: one address, authentication, limits, timeouts and metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from baton.gateway import body_parser, body_reader, parsed_request
from baton.gateway.caller_slots import CallerSlots
from baton.gateway.cells import Cells
from baton.gateway.client_disconnect import until_disconnect
from baton.gateway.coordinator_queries import request_credential
from baton.gateway.error_responses import CLIENT_CLOSED_REQUEST, HttpError, invalid_value
from baton.gateway.metrics import GatewayStats
from baton.runtime.config import HttpConfig

if TYPE_CHECKING:
    # Its HTTP client is imported only where servers are configured.
    from baton.gateway.pooling_servers import PoolingServers

_log = logging.getLogger(__name__)

POOLING_ROUTES = ("/v1/embeddings", "/v1/rerank", "/v1/score")


def pooling_servers(config: HttpConfig, stats: GatewayStats) -> PoolingServers | None:
    """Returns the servers of pooling models; None: none is configured."""
    if not config.pooling:
        return None
    # The HTTP client takes a third of a second to import.
    from baton.gateway.pooling_servers import PoolingServers

    return PoolingServers(config.pooling, stats)


def pooling_routes(
    servers: PoolingServers | None,
    cells: Cells,
    bodies: body_reader.BodyReader,
    stats: GatewayStats,
    slots: CallerSlots,
) -> list[Route]:
    """Returns the routes; arguments as in PoolingRoute. They count their requests themselves."""
    return [
        Route(path, PoolingRoute(path, servers, cells, bodies, stats, slots), methods=["POST"])
        for path in POOLING_ROUTES
    ]


class PoolingRoute:
    """One route, as an ASGI application.

    Args:
        path: The route's path.
        servers: The servers; None: none is configured.
        cells: Check the credentials of callers.
        bodies: Reads the requests' bodies.
        stats: Counts the requests.
        slots: Slots of the requests that run on this gateway.
    """

    def __init__(
        self,
        path: str,
        servers: PoolingServers | None,
        cells: Cells,
        bodies: body_reader.BodyReader,
        stats: GatewayStats,
        slots: CallerSlots,
    ) -> None:
        self._path, self._servers, self._cells = path, servers, cells
        self._bodies, self._stats, self._slots = bodies, stats, slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, started_at = Headers(scope=scope), time.monotonic()
        request_id = headers.get("x-request-id") or parsed_request.new_request_id("pool")
        reply = _Reply(send, request_id)
        try:
            await self._serve(headers, receive, reply)
            if (latency := self._stats.latencies.get((self._path, "interactive"))) is not None:
                latency.e2e.observe(time.monotonic() - started_at)
        except body_reader.ClientDisconnected:
            reply.status = CLIENT_CLOSED_REQUEST
        except HttpError as problem:
            await reply.fail(problem, receive)
        except Exception:
            _log.exception("%s failed", self._path, extra={"request_id": request_id})
            await reply.fail(HttpError(500, "internal error", kind="server_error"), receive)
        finally:
            self._stats.requests[self._path, reply.status] += 1

    async def _serve(self, headers: Headers, receive: Receive, reply: _Reply) -> None:
        body = await self._bodies.read(receive, headers)
        if self._servers is None:
            raise _off(self._path)
        # Only the coordinators know which credentials are valid.
        await self._cells.models(request_credential(headers))
        server = self._servers.of(_model(body, self._servers.models[0]))
        timeout_s = min(server.timeout_s, parsed_request.timeout_s(headers) or server.timeout_s)
        try:
            with self._slots.hold(request_credential(headers)):
                async with asyncio.timeout(timeout_s):
                    forwarding = self._servers.forward(
                        server, self._path, body, headers, reply.send
                    )
                    await until_disconnect(forwarding, receive)
        except TimeoutError:
            message = f"the server of {server.model!r} did not answer within {timeout_s:g} s"
            raise HttpError(504, message, kind="timeout_error", code="timeout") from None


class _Reply:
    """The response to one request.

    Attributes:
        status: HTTP status of the response, for the metrics.
    """

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._request_id, self._started = send, request_id, False
        self.status = 200

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            headers = MutableHeaders(raw=list(message["headers"]))
            headers["x-request-id"] = self._request_id
            message = {**message, "headers": headers.raw}
        await self._send(message)

    async def fail(self, problem: HttpError, receive: Receive) -> None:
        """Sends an error, unless the response has begun: its end then tells that it is cut off."""
        self.status = problem.status
        if self._started:
            raise ConnectionError(str(problem))
        unread = problem.status in body_reader.UNREAD_BODY_STATUSES
        headers = [(b"content-type", b"application/json"), *problem.headers()]
        headers += [(b"connection", b"close")] if unread else []
        await self.send({"type": "http.response.start", "status": self.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": problem.body(), "more_body": unread})
        if unread:
            await body_reader.discard_body(receive)
            await self.send({"type": "http.response.body", "body": b""})


def _model(body: bytes, default: str) -> str:
    """Returns the model that a body names. The server checks the other fields."""
    model = body_parser.json_object(body).get("model")
    if model is None:
        return default
    if not isinstance(model, str):
        raise invalid_value("model", model, "must be the name of a model")
    return model


def _off(path: str) -> HttpError:
    message = (
        f"{path}: this gateway has no pooling model: run `vllm serve MODEL --runner pooling` and "
        "name the model and the server's URL in http.pooling"
    )
    return HttpError(501, message, kind="server_error", code="pooling_off", permanent=True)
