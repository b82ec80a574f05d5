"""Reads a file that a client uploads as multipart/form-data."""

from __future__ import annotations

import asyncio
import errno
import tempfile
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from baton.gateway.body_reader import ClientDisconnected
from baton.gateway.error_responses import HttpError, invalid_value
from baton.runtime.config import HttpConfig
from baton.runtime.errors import shown

# Room for the boundaries and the other fields of the form.
_FORM_BYTES = 64 * 2**10
_MAX_FIELDS, _MAX_FIELD_BYTES = 8, 1024
# Longest upload; http.read_timeout_s limits the wait for each part of it.
_TIMEOUT_S = 600.0
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
# OpenAI's range of expires_after, in seconds.
MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 2_592_000


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that is complete; close `file` after use.

    Attributes:
        file: The content, in a temporary file if it is large.
        filename: Its name at the client.
        num_bytes: Its size.
        expires_s: Seconds for which it is kept; None: the configured time.
    """

    file: UploadFile
    filename: str
    num_bytes: int
    expires_s: int | None


async def read_upload(request: Request, config: HttpConfig) -> Upload:
    """Reads the form of POST /v1/files.

    Raises:
        ClientDisconnected: The client left.
        HttpError: The form or a field is wrong, or the file is too large or too slow.
    """
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "multipart/form-data":
        message = f"content-type is {shown(kind)}; must be multipart/form-data"
        raise HttpError(415, message, param="content-type", code="unsupported_media_type")
    if "origin" in request.headers:
        # Pages of other origins may send such forms without a preflight request (CORS).
        raise HttpError(403, "origin: web pages may not upload files", param="origin")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            form = await MultiPartParser(
                request.headers,
                _limited(request, config),
                max_files=1,
                max_fields=_MAX_FIELDS,
                max_part_size=_MAX_FIELD_BYTES,
            ).parse()
    except MultiPartException as error:
        message = f"the body is not a form with one file: {error.message}"
        raise HttpError(400, message, code="invalid_form") from None
    except ClientDisconnect:
        raise ClientDisconnected from None
    except TimeoutError:
        message = f"the upload was not complete within {_TIMEOUT_S:g} s"
        raise HttpError(408, message, code="request_timeout") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        message = f"no room for the upload in the gateway's {tempfile.gettempdir()}"
        raise HttpError(
            507, message, kind="server_error", code="storage_full", permanent=True
        ) from None
    try:
        fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
        for name in form:
            if name not in ("file", *_FIELDS):
                raise HttpError(
                    400, f"{name[:80]}: unknown field", param=name[:80], code="unknown_parameter"
                )
        file = form.get("file")
        if not isinstance(file, UploadFile):
            message = "file is missing; must be a file with a name"
            raise HttpError(400, message, param="file", code="missing_parameter")
        if fields.get("purpose") != "batch":
            raise invalid_value("purpose", fields.get("purpose"), "must be 'batch'")
        num_bytes = file.size or 0
        if num_bytes > config.batches.max_file_bytes:
            raise _too_large(config)
        return Upload(file, (file.filename or "")[:255], num_bytes, _expires_s(fields))
    except BaseException:
        await form.close()
        raise


def _expires_s(fields: dict[str, str]) -> int | None:
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid_value("expires_after.anchor", anchor, "must be 'created_at'")
    value = int(seconds) if seconds is not None and seconds.isdecimal() else -1
    if not MIN_EXPIRES_S <= value <= MAX_EXPIRES_S:
        allowed = f"must be a number from {MIN_EXPIRES_S} to {MAX_EXPIRES_S}"
        raise invalid_value("expires_after.seconds", seconds, allowed)
    return value


async def _limited(request: Request, config: HttpConfig) -> AsyncGenerator[bytes, None]:
    """Yields the parts of the body; each must come in time, and all must fit the limit."""
    stream, num_bytes = request.stream(), 0
    while True:
        try:
            async with asyncio.timeout(config.read_timeout_s):
                part = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            message = f"no more of the upload came within {config.read_timeout_s:g} s"
            raise HttpError(408, message, code="request_timeout") from None
        num_bytes += len(part)
        if num_bytes > config.batches.max_file_bytes + _FORM_BYTES:
            raise _too_large(config)
        yield part


def _too_large(config: HttpConfig) -> HttpError:
    message = (
        f"the file is longer than {config.batches.max_file_bytes} bytes "
        "(http.batches.max_file_bytes)"
    )
    return HttpError(413, message, param="file", code="file_too_large")
