"""The form in which a module lists its HTTP routes for the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

Endpoint = Callable[[Request], Awaitable[Response]]
# Path, endpoint and methods of each route. An endpoint raises HttpError for an error response.
RouteTable = list[tuple[str, Endpoint, list[str]]]
