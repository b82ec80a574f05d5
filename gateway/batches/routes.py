"""The routes of OpenAI's Files and Batches APIs.

Source: https://platform.openai.com/docs/api-reference/files and /batch. The objects are
those of the `openai` package. A caller sees the files and batches of its own credential only.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Literal, TypeVar

from openai.types import Batch, FileDeleted, FileObject
from pydantic import BaseModel, Field, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from baton.gateway import body_reader
from baton.gateway.batches import BATCHES, FILES
from baton.gateway.batches.batch_store import NewBatch, OpenBatch
from baton.gateway.batches.file_store import CHUNK_BYTES, StoreFull, new_id
from baton.gateway.batches.runner import BatchRunner
from baton.gateway.batches.status import Status
from baton.gateway.batches.upload import MAX_EXPIRES_S, MIN_EXPIRES_S, Upload, read_upload
from baton.gateway.body_parser import parse_body
from baton.gateway.caller_slots import CallerSlots
from baton.gateway.cells import Cells
from baton.gateway.coordinator_queries import caller_digest, request_credential, with_bearer
from baton.gateway.error_responses import HttpError, invalid_value
from baton.gateway.request_bodies import BodyModel
from baton.gateway.route_table import CountedRoute, Endpoint, RouteTable
from baton.runtime.config import HttpConfig
from baton.runtime.errors import shown

T = TypeVar("T", bound=BaseModel)

# Uploads that are read at the same time.
_MAX_UPLOADS = 8
_MAX_FILES_LISTED, _MAX_BATCHES_LISTED, _BATCHES_LISTED = 10_000, 100, 20
# OpenAI's limits of metadata.
_MAX_PAIRS, _MAX_KEY_CHARS, _MAX_VALUE_CHARS = 16, 64, 512


class ExpiresAfter(BodyModel):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_EXPIRES_S, le=MAX_EXPIRES_S)]


class BatchBody(BodyModel):
    """The body of POST /v1/batches."""

    input_file_id: str
    # Path of a generation route.
    endpoint: str
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    @field_validator("metadata")
    @classmethod
    def _has_few_pairs(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        pairs = value or {}
        if (
            len(pairs) > _MAX_PAIRS
            or any(len(key) > _MAX_KEY_CHARS for key in pairs)
            or any(len(one) > _MAX_VALUE_CHARS for one in pairs.values())
        ):
            raise ValueError(
                f"must have at most {_MAX_PAIRS} pairs, with at most {_MAX_KEY_CHARS} characters "
                f"in a key and {_MAX_VALUE_CHARS} in a value"
            )
        return value


class BatchRoutes:
    """The endpoints.

    Args:
        runner: Runs the batches.
        cells: Check the credentials of callers.
        config: Limits.
        bodies: Reads the requests' bodies.
    """

    def __init__(
        self, runner: BatchRunner, cells: Cells, config: HttpConfig, bodies: body_reader.BodyReader
    ) -> None:
        self._runner, self._cells, self._config = runner, cells, config
        self._bodies = bodies
        self._uploads = CallerSlots(_MAX_UPLOADS, "uploads", "too_many_uploads")

    def table(self) -> RouteTable:
        """Returns the routes."""
        return [
            CountedRoute(path, _answered(self._admitting(endpoint)), methods, name)
            for name, path, endpoint, methods in (
                (FILES, FILES, self.files, ("GET", "POST")),
                (FILES, f"{FILES}/{{id}}", self.file, ("GET", "DELETE")),
                (FILES, f"{FILES}/{{id}}/content", self.content, ("GET",)),
                (BATCHES, BATCHES, self.batches, ("GET", "POST")),
                (BATCHES, f"{BATCHES}/{{id}}", self.batch, ("GET",)),
                (BATCHES, f"{BATCHES}/{{id}}/cancel", self.cancel, ("POST",)),
            )
        ]

    async def files(self, request: Request) -> Response:
        """Answers POST and GET of /v1/files."""
        if request.method == "POST":
            return _json(await self._uploaded(request))
        query = _Query(request, "after", "limit", "order", "purpose")
        limit = query.limit(_MAX_FILES_LISTED, _MAX_FILES_LISTED)
        ascending = query.one_of("order", "desc", "asc") == "asc"
        owner, after, runner = _owner(request), query.get("after"), self._runner
        return await self._page(
            after,
            lambda: runner.files.page(
                owner,
                after,
                limit,
                runner.now(),
                purpose=query.get("purpose"),
                ascending=ascending,
            ),
        )

    async def file(self, request: Request) -> Response:
        """Answers GET and DELETE of /v1/files/{id}."""
        file = await self._file(request, request.path_params["id"])
        # Starlette adds HEAD to GET.
        if request.method != "DELETE":
            return _json(file)
        call, files = self._runner.thread.call, self._runner.files
        await call(files.delete, _owner(request), file.id)
        return _json(FileDeleted(id=file.id, object="file", deleted=True))

    async def content(self, request: Request) -> Response:
        """Answers GET of /v1/files/{id}/content."""
        file = await self._file(request, request.path_params["id"])
        return StreamingResponse(
            self._parts(_owner(request), file),
            media_type="application/octet-stream",
            headers={"content-length": str(file.bytes)},
        )

    async def batches(self, request: Request) -> Response:
        """Answers POST and GET of /v1/batches."""
        if request.method == "POST":
            return _json(await self._created(request))
        query = _Query(request, "after", "limit")
        limit = query.limit(_BATCHES_LISTED, _MAX_BATCHES_LISTED)
        owner, after = _owner(request), query.get("after")
        return await self._page(after, lambda: self._runner.batches.page(owner, after, limit))

    async def batch(self, request: Request) -> Response:
        """Answers GET of /v1/batches/{id}."""
        return _json(await self._batch(request))

    async def cancel(self, request: Request) -> Response:
        """Answers POST of /v1/batches/{id}/cancel."""
        batch = await self._batch(request)
        runner = self._runner
        if not await runner.thread.call(runner.batches.begin_cancel, batch.id, runner.now()):
            message = f"batch {batch.id} is {batch.status}; it cannot be cancelled any more"
            raise HttpError(409, message, code="batch_ended")
        runner.end(batch.id, Status.CANCELLED)
        return _json(await self._batch(request))

    # ---- Inside

    async def _uploaded(self, request: Request) -> FileObject:
        owner = _owner(request)
        with self._uploads.hold(_credential(request)):
            upload = await read_upload(request, self._config)
            try:
                return await self._stored(owner, upload)
            finally:
                await upload.file.close()

    async def _stored(self, owner: bytes, upload: Upload) -> FileObject:
        call, files, now = self._runner.thread.call, self._runner.files, self._runner.now()
        file_id = new_id("files")
        try:
            await call(files.begin_upload, file_id, owner, upload.num_bytes)
            number = 0
            while data := await upload.file.read(CHUNK_BYTES):
                await call(files.add_chunk, file_id, number, data)
                number += 1
            file = FileObject(
                id=file_id,
                object="file",
                bytes=upload.num_bytes,
                created_at=now,
                expires_at=now + (upload.expires_s or round(self._config.batches.expires_s)),
                filename=upload.filename,
                purpose="batch",
                status="processed",
            )
            await call(files.finish_upload, owner, file)
        except BaseException:
            # On a full disk, the runner deletes the chunks later.
            with contextlib.suppress(sqlite3.OperationalError):
                await call(files.drop_upload, file_id)
            raise
        return file

    async def _created(self, request: Request) -> Batch:
        owner = _owner(request)
        sent = await self._bodies.read(request.receive, request.headers)
        body = parse_body(sent, BatchBody)
        if body.endpoint not in self._runner.endpoints:
            allowed = f"must be {' or '.join(map(repr, self._runner.endpoints))}"
            raise invalid_value("endpoint", body.endpoint, allowed)
        file = await self._file(request, body.input_file_id, "input_file_id")
        if file.purpose != "batch":
            message = f"input_file_id is {file.id!r}, a file with purpose {file.purpose}"
            raise HttpError(
                400, f"{message}; must be batch", param="input_file_id", code="invalid_value"
            )
        expires = body.output_expires_after
        new = NewBatch(
            owner,
            _credential(request),
            request.headers.get("x-baton-tenant", ""),
            body.endpoint,
            file.id,
            file.bytes,
            body.metadata,
            expires.seconds if expires is not None else round(self._config.batches.expires_s),
        )
        runner = self._runner

        def create() -> OpenBatch:
            # The lines are kept beside the file until they are done.
            runner.files.check_room(owner, file.bytes)
            return runner.batches.create(new, runner.now())

        created = await runner.thread.call(create)
        runner.start(created)
        batch = await runner.thread.call(runner.batches.find, owner, created.id)
        assert batch is not None
        return batch

    def _admitting(self, endpoint: Endpoint) -> Endpoint:
        """Wraps an endpoint: refuses callers that no coordinator admits.

        Only the coordinators know which credentials are valid: a key may be removed while files of
        its owner are still stored. Without a reachable coordinator, all callers get a 503.
        """

        async def answer(request: Request) -> Response:
            await self._cells.models(_credential(request))
            # A full disk prevents deletions but no reads; the runner logs this and tries again.
            with contextlib.suppress(sqlite3.OperationalError):
                await self._runner.sweep()
            return await endpoint(request)

        return answer

    async def _file(self, request: Request, name: str, param: str = "id") -> FileObject:
        files = self._runner.files
        call, now = self._runner.thread.call, self._runner.now()
        found = await call(files.find, _owner(request), name, now)
        if found is None:
            message = f"{param} is {shown(name)}; there is no such file, or not any more"
            status = 404 if param == "id" else 400
            raise HttpError(status, message, param=param, code="not_found")
        return found

    async def _batch(self, request: Request) -> Batch:
        name, batches = request.path_params["id"], self._runner.batches
        found = await self._runner.thread.call(batches.find, _owner(request), name)
        if found is None:
            message = f"id is {shown(name)}; there is no such batch, or not any more"
            raise HttpError(404, message, param="id", code="not_found")
        return found

    async def _page(self, after: str | None, page: Callable[[], tuple[list[T], bool]]) -> Response:
        try:
            found, more = await self._runner.thread.call(page)
        except LookupError:
            raise invalid_value("after", after, "must be the ID of an object in the list") from None
        data = [one.model_dump(mode="json") for one in found]
        return JSONResponse(
            {
                "object": "list",
                "data": data,
                "first_id": data[0]["id"] if data else None,
                "last_id": data[-1]["id"] if data else None,
                "has_more": more,
            }
        )

    async def _parts(self, owner: bytes, file: FileObject) -> AsyncIterator[bytes]:
        call, files = self._runner.thread.call, self._runner.files
        position, num_left = 0, file.bytes
        while num_left:
            part = await call(files.read, owner, file.id, position)
            if part is None or not part.data:
                raise ConnectionError(f"{file.id} was deleted while a client read it")
            position, num_left = part.next, num_left - len(part.data)
            yield part.data


class _Query:
    """Query parameters of a list.

    Args:
        request: The request.
        known: Names of the parameters that it may have.
    """

    def __init__(self, request: Request, *known: str) -> None:
        self._values = request.query_params
        for name in self._values:
            if name not in known:
                message = f"{name[:80]}: unknown parameter; known are {', '.join(known)}"
                raise HttpError(400, message, param=name[:80], code="unknown_parameter")

    def get(self, name: str) -> str | None:
        return self._values.get(name)

    def limit(self, default: int, most: int) -> int:
        value = self._values.get("limit", str(default))
        is_number = value.isdecimal() and len(value) <= len(str(most))
        if not is_number or not 1 <= int(value) <= most:
            raise invalid_value("limit", value, f"must be a number from 1 to {most}")
        return int(value)

    def one_of(self, name: str, *allowed: str) -> str:
        value = self._values.get(name, allowed[0])
        if value not in allowed:
            raise invalid_value(name, value, f"must be {' or '.join(allowed)}")
        return value


def _credential(request: Request) -> str:
    return request_credential(with_bearer(request.headers))


def _owner(request: Request) -> bytes:
    return caller_digest(_credential(request))


def _json(found: BaseModel) -> Response:
    return Response(found.model_dump_json(), media_type="application/json")


def _answered(endpoint: Endpoint) -> Endpoint:
    """Turns errors of a full store or disk into error responses."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (StoreFull, sqlite3.OperationalError) as error:
            raise HttpError(
                507, str(error), kind="server_error", code="storage_full", permanent=True
            ) from None

    return answer
