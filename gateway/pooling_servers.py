"""The servers of pooling models, which are plain vLLM servers."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Self

import httpx2 as httpx
import pydantic_core
from starlette.datastructures import Headers
from starlette.types import Message, Send

from baton.gateway import error_responses
from baton.gateway.error_responses import HttpError
from baton.gateway.metrics import GatewayStats
from baton.runtime.closing import AsyncClosing
from baton.runtime.config import PoolingConfig
from baton.runtime.process.long_tasks import keep_running

_log = logging.getLogger(__name__)

# Pause between two health checks of a server, and the longest wait for its answer.
_HEALTH_PAUSE_S, _HEALTH_TIMEOUT_S = 5.0, 2.0
# An idle connection is closed after this, before the server does: vLLM waits 5 s.
_KEEP_ALIVE_S = 2.0
# Longest error of a server that is read.
_MAX_ERROR_BYTES = 64 * 2**10
_FORWARDED_HEADERS = (b"traceparent", b"tracestate", b"x-request-id")


class PoolingServers(AsyncClosing):
    """The servers of pooling models.

    Use as a context: health checks run inside it.

    Args:
        configs: Model and URL of each server; servers of the same model share its requests.
        stats: Gets the health of each server.
    """

    def __init__(self, configs: Sequence[PoolingConfig], stats: GatewayStats) -> None:
        self._configs, self._health = configs, stats.pooling_health
        self._num_running: Counter[str] = Counter()
        self._client = httpx.AsyncClient(
            # The gateway's own limit of running requests applies first.
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=64,
                keepalive_expiry=_KEEP_ALIVE_S,
            ),
            timeout=None,
            trust_env=False,
        )
        self._checks: list[asyncio.Task[None]] = []
        for config in configs:
            self._health[config.model, config.url] = True

    @property
    def models(self) -> list[str]:
        """Names of the models, in the order of the configuration."""
        return list(dict.fromkeys(config.model for config in self._configs))

    async def __aenter__(self) -> Self:
        self._checks = [
            asyncio.create_task(
                keep_running(f"health of {config.url}", functools.partial(self._check, config))
            )
            for config in self._configs
        ]
        return self

    async def aclose(self) -> None:
        """Ends health checks and connections; idempotent."""
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await self._client.aclose()

    def of(self, model: str) -> PoolingConfig:
        """Returns the server for the next request to a model: healthy, with the fewest requests.

        Raises:
            HttpError: No server has this model.
        """
        found = [config for config in self._configs if config.model == model]
        if not found:
            raise error_responses.model_not_found(model, self.models)
        return min(
            found,
            key=lambda one: (not self._health[one.model, one.url], self._num_running[one.url]),
        )

    async def forward(
        self, server: PoolingConfig, path: str, body: bytes, headers: Headers, send: Send
    ) -> None:
        """Sends a request to a server and its response to `send`.

        Raises:
            HttpError: The server refused the request, or failed before its response began.
        """
        sent = [(name, value) for name, value in headers.raw if name in _FORWARDED_HEADERS]
        sent.append((b"content-type", b"application/json"))
        self._num_running[server.url] += 1
        try:
            async with self._client.stream(
                "POST", f"{server.url}{path}", content=body, headers=sent
            ) as response:
                self._health[server.model, server.url] = True
                if response.status_code != 200:
                    raise await _refusal(server, path, response)
                await send(_start(response.headers))
                async for part in response.aiter_bytes():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except httpx.RequestError as error:
            self._health[server.model, server.url] = False
            told = str(error) or type(error).__name__
            message = f"the server of {server.model!r} at {server.url} failed: {told}"
            kind = "service_unavailable_error"
            raise HttpError(503, message, kind=kind, retry_after_s=1.0) from None
        finally:
            self._num_running[server.url] -= 1

    async def _check(self, config: PoolingConfig) -> None:
        """Keeps the health of a server up to date."""
        while True:
            try:
                async with asyncio.timeout(_HEALTH_TIMEOUT_S):
                    answer = await self._client.get(f"{config.url}/health")
                healthy = answer.status_code == 200
            except (TimeoutError, httpx.RequestError):
                healthy = False
            if healthy is not self._health[config.model, config.url]:
                told = "serves again" if healthy else "does not answer its health check"
                _log.warning("pooling server %s %s", config.url, told)
            self._health[config.model, config.url] = healthy
            await asyncio.sleep(_HEALTH_PAUSE_S)


def _start(answered: httpx.Headers) -> Message:
    found = {"content-type": "application/json", **answered}
    # vLLM describes the vectors of `"encoding_format": "bytes"` in the header `metadata`.
    headers = [
        (name.encode(), found[name].encode("latin-1", "replace"))
        for name in ("content-type", "metadata")
        if name in found
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}


async def _refusal(server: PoolingConfig, path: str, response: httpx.Response) -> HttpError:
    """Reads the error of a server; its form is that of the other routes."""
    body = b""
    async for part in response.aiter_bytes():
        body += part
        if len(body) > _MAX_ERROR_BYTES:
            break
    try:
        error = pydantic_core.from_json(body)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        error, message, param = {}, "", None
    status = response.status_code
    if status == 404 and not message:
        message = f"model {server.model!r} does not support {path}"
        return HttpError(400, message, param="model", code="unsupported_route")
    if status >= 500 or not status >= 400:
        message = f"the server of {server.model!r} at {server.url} answered {status}: {message}"
        return HttpError(502, message, kind="server_error", code="bad_gateway")
    kind = error_responses.INVALID_REQUEST
    return HttpError(status, message, kind=kind, param=param and str(param), code="invalid_value")
