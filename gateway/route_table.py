"""The form in which a module lists its HTTP routes for the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.gateway.body_reader import BodyReader
from baton.gateway.client_disconnect import until_disconnect
from baton.gateway.error_responses import HttpError

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class CountedRoute:
    """An HTTP route whose requests the application counts.

    Attributes:
        path: Path in Starlette's form.
        endpoint: Answers a request. It raises HttpError for an error response.
        methods: HTTP methods.
        name: Name of the route in the metrics; empty: the path.
        error_body: Renders the body of an error response; by default in OpenAI's form.
    """

    path: str
    endpoint: Endpoint
    methods: Sequence[str] = ("GET",)
    name: str = ""
    error_body: Callable[[HttpError], bytes] = HttpError.body


RouteTable = list[CountedRoute]


def json_endpoint(
    bodies: BodyReader, answer: Callable[[bytes, Mapping[str, str]], Awaitable[dict[str, object]]]
) -> Endpoint:
    """Returns an endpoint that reads a JSON body; it ends when the client leaves.

    Args:
        bodies: Reads the bodies.
        answer: Returns the JSON object of the response, from the body and the headers.
    """

    async def endpoint(request: Request) -> Response:
        body = await bodies.read(request.receive, request.headers)
        answering = answer(body, request.headers)
        return JSONResponse(await until_disconnect(answering, request.receive))

    return endpoint
