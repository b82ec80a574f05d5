"""The routes of files and batches on a gateway that keeps none."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from baton.gateway.batches import BATCHES, FILES
from baton.gateway.error_responses import HttpError
from baton.gateway.route_table import CountedRoute, RouteTable

_METHODS = ("GET", "POST", "DELETE")


def table() -> RouteTable:
    """Returns the routes, which refuse every request and say how to get batches."""
    return [
        CountedRoute(path, _refuse, _METHODS, name)
        for name in (FILES, BATCHES)
        for path in (name, f"{name}/{{rest:path}}")
    ]


async def _refuse(request: Request) -> Response:
    message = (
        "this gateway keeps no files and batches: set http.batches.dir to a directory for them"
    )
    raise HttpError(501, message, kind="server_error", code="batches_off", permanent=True)
