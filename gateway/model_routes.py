"""The routes that list models, with the fields of OpenAI's, vLLM's and Anthropic's API."""

from __future__ import annotations

import time
from collections.abc import Collection
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.gateway import error_responses
from baton.gateway.cells import Cells
from baton.gateway.coordinator_queries import request_credential, with_bearer
from baton.gateway.route_table import CountedRoute, RouteTable

MODELS = "/v1/models"


class ModelRoutes:
    """The routes below /v1/models.

    Args:
        cells: The cells behind the gateway; they tell their models.
        pooling: Names of the pooling models.
    """

    def __init__(self, cells: Cells, pooling: Collection[str]) -> None:
        self._cells, self._pooling = cells, pooling
        self._created = int(time.time())

    def table(self) -> RouteTable:
        """Returns the routes."""
        return [
            CountedRoute(MODELS, self._all),
            # Some clients put a slash behind each path.
            CountedRoute(f"{MODELS}/", self._all, name=MODELS),
            CountedRoute(f"{MODELS}/{{name:path}}", self._one, name=MODELS),
        ]

    async def _all(self, request: Request) -> Response:
        found = await self._listed(request)
        # Anthropic's clients read pages. This is the only one.
        ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {}
        return JSONResponse({"object": "list", "data": found, "has_more": False, **ends})

    async def _one(self, request: Request) -> Response:
        found = await self._listed(request)
        name = request.path_params["name"]
        for one in found:
            if one["id"] == name:
                return JSONResponse(one)
        raise error_responses.model_not_found(name, [str(one["id"]) for one in found])

    async def _listed(self, request: Request) -> list[dict[str, object]]:
        """Lists each base model followed by its adapters, as vLLM does, and the pooling models."""
        models = await self._cells.models(request_credential(with_bearer(request.headers)))
        created_at = datetime.fromtimestamp(self._created, UTC).isoformat()
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "baton",
                "root": name,
                "parent": parent,
                "max_model_len": max_model_len or None,
                "type": "model",
                "display_name": name,
                "created_at": created_at,
            }
            for name, parent, max_model_len in (
                *(
                    (name, parent, model.max_model_len)
                    for model in models
                    for name, parent in (
                        (model.name, None),
                        *((adapter.name, model.name) for adapter in model.adapters),
                    )
                ),
                *((name, None, 0) for name in self._pooling),
            )
        ]
