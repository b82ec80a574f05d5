"""OpenAI's Responses API: its dialect, and stored responses."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, cast

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.gateway.cells import Cells
from baton.gateway.converted_chat import Conversion, ConvertedDialect
from baton.gateway.coordinator_queries import request_credential, with_bearer
from baton.gateway.error_responses import HttpError, invalid_value
from baton.gateway.parsed_request import session_in
from baton.gateway.response_store import ResponseStore, StoredResponse
from baton.gateway.route_table import CountedRoute, RouteTable

RESPONSES = "/v1/responses"
# Fields of the Responses API by the fields of the chat that they become.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


class Responses(ConvertedDialect):
    """The dialect of /v1/responses.

    Args:
        max_body_bytes: Like ConvertedDialect.
        store: The stored responses.
        cells: Check the credentials of callers that read or delete stored responses.
    """

    path, id_prefix = RESPONSES, "resp"
    module, names = "openai_responses", _NAMES
    # Stored responses are in memory; those of a batch would replace those of conversations.
    batch_defaults: ClassVar[Mapping[str, object]] = {"store": False}

    def __init__(self, max_body_bytes: int, store: ResponseStore, cells: Cells) -> None:
        super().__init__(max_body_bytes)
        self._store, self._cells = store, cells

    def convert(self, module: ModuleType, body: bytes, headers: Headers) -> Conversion:
        credential = _credential(headers)

        def previous(response_id: str) -> StoredResponse:
            found = self._store.find(credential, response_id)
            if found is None:
                raise self._not_stored(400, response_id, "previous_response_id")
            return found

        def keep(response: StoredResponse) -> None:
            self._store.add(credential, response)

        def item(item_id: str) -> dict[str, Any] | None:
            return self._store.find_item(credential, item_id)

        conversion = module.ResponseConversion(body, previous, item, keep)
        if session_in(headers) and conversion.chat["prompt_cache_key"] == conversion.root_id:
            # The client has given no key, and the agent's session spans its conversations.
            del conversion.chat["prompt_cache_key"]
        return cast("Conversion", conversion)

    def table(self) -> RouteTable:
        """Returns the route of stored responses."""
        path = f"{RESPONSES}/{{id}}"
        return [CountedRoute(path, self._stored, ("GET", "DELETE"), RESPONSES)]

    async def _stored(self, request: Request) -> Response:
        credential, name = _credential(request.headers), request.path_params["id"]
        # Only the coordinators know which credentials are valid.
        await self._cells.models(credential)
        if request.method == "DELETE":
            if not self._store.delete(credential, name):
                raise self._not_stored(404, name)
            return JSONResponse({"id": name, "object": "response", "deleted": True})
        stream = request.query_params.get("stream", "false")
        if stream.lower() not in ("false", "0"):
            allowed = "must be false: a stored response is sent as a whole"
            raise invalid_value("stream", stream, allowed)
        found = self._store.find(credential, name)
        if found is None:
            raise self._not_stored(404, name)
        return JSONResponse(found.body)

    def _not_stored(self, status: int, name: str, param: str | None = None) -> HttpError:
        if not self._store.max_bytes:
            message = "this gateway stores no responses: http.stored_responses_bytes is 0"
        else:
            message = f"response {name[:80]!r} is not stored here, or not any more"
        code = "previous_response_not_found" if param else "not_found"
        return HttpError(status, message, param=param, code=code)


def _credential(headers: Headers) -> str:
    """Returns the credential with which the converted request reaches the coordinator."""
    return request_credential(with_bearer(headers))
