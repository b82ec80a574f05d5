"""The routes of the dashboard.

Its data is for operators: the coordinator checks the caller's credential.
"""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from baton.client.errors import NotFoundError
from baton.gateway import dashboard, error_responses
from baton.gateway.admin_credential import use_credential
from baton.gateway.cell import Cell
from baton.gateway.cells import Cells
from baton.gateway.coordinator_queries import PerCallerQuery, QueryLimiter, request_credential
from baton.gateway.dashboard.data import overview
from baton.gateway.dashboard.data import request as render_request
from baton.gateway.error_responses import HttpError
from baton.gateway.route_table import CountedRoute, Endpoint, RouteTable
from baton.runtime.errors import RemoteError, shown

DASHBOARD = "/dashboard"
# Seconds for which the dashboard's data is cached per caller.
_OVERVIEW_TTL_S = 1.0
_MAX_LISTED = 25
_DATA_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
# The page loads nothing from other origins, and no other page may embed it in a frame.
_PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_NOT_FOUND = "not_found_error"


class DashboardRoutes:
    """The dashboard's page and data.

    Args:
        cells: The cells behind the gateway.
        query_limiter: Limits the queries to the coordinators.
    """

    def __init__(self, cells: Cells, query_limiter: QueryLimiter) -> None:
        self._cells, self._query_limiter = cells, query_limiter
        self._overviews = {
            cell.name: PerCallerQuery(
                partial(_fetch_overview, cell), _OVERVIEW_TTL_S, query_limiter
            )
            for cell in cells
        }

    def table(self) -> RouteTable:
        """Returns the routes."""
        pages = [
            (f"{DASHBOARD}/{path}".rstrip("/"), _page(body, kind))
            for path, (body, kind) in dashboard.files().items()
        ]
        routes = [
            # `baton up` prints the root URL, which people open in a browser.
            ("/", _redirect),
            *pages,
            (f"{DASHBOARD}/data", self._data),
            (f"{DASHBOARD}/requests/{{request_id:path}}", self._waterfall),
        ]
        return [CountedRoute(path, endpoint, name=DASHBOARD) for path, endpoint in routes]

    def _selected_cell(self, request: Request) -> Cell:
        """Returns the cell that the query names; by default the first reachable cell.

        Raises HttpError if there is no cell of that name.
        """
        name = request.query_params.get("cell")
        if name is None:
            return min(self._cells, key=self._cells.is_unreachable)
        for cell in self._cells:
            if cell.name == name:
                return cell
        known = " or ".join(repr(cell.name) for cell in self._cells)
        message = f"cell is {shown(name)}; must be {known}"
        raise HttpError(404, message, kind=_NOT_FOUND, param="cell", code="no_such_cell")

    async def _data(self, request: Request) -> Response:
        # All viewers with the same credential share one query per _OVERVIEW_TTL_S.
        name = self._selected_cell(request).name
        found = await self._overviews[name].get(request_credential(request.headers))
        found = {**found, "cell": name, "cells": [cell.name for cell in self._cells]}
        return JSONResponse(found, headers=_DATA_HEADERS)

    async def _waterfall(self, request: Request) -> Response:
        watcher = self._selected_cell(request).watcher
        with use_credential(request_credential(request.headers)):
            try:
                request_id = request.path_params["request_id"]
                tenant = request.query_params.get("tenant", "")
                found = await self._query_limiter.run(lambda: watcher.request(request_id, tenant))
            except NotFoundError as error:
                message = str(error)
                raise HttpError(404, message, kind=_NOT_FOUND, code="request_not_found") from None
            except RemoteError as error:
                raise error_responses.from_remote_error(error) from None
        return JSONResponse(render_request(found), headers=_DATA_HEADERS)


def _page(body: bytes, kind: str) -> Endpoint:
    async def answer(request: Request) -> Response:
        return Response(body, media_type=kind, headers=_PAGE_HEADERS)

    return answer


async def _redirect(request: Request) -> Response:
    return RedirectResponse(DASHBOARD)


async def _fetch_overview(cell: Cell, authorization: str) -> dict[str, object]:
    """Fetches the dashboard's data of a cell with a caller's credential."""
    with use_credential(authorization):
        view = await cell.watcher.look(include_history=True)
        return overview(view, await cell.watcher.requests(_MAX_LISTED))
