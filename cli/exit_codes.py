"""Turns an error into one line of text and an exit code."""

from __future__ import annotations

import os

from google.rpc import code_pb2

from baton.client.errors import UnauthenticatedError
from baton.runtime.config_error import ConfigError
from baton.runtime.errors import BatonError, RemoteError

FAILED, USAGE, UNAVAILABLE = 1, 2, 3

_BY_CODE = {
    code_pb2.INVALID_ARGUMENT: USAGE,
    code_pb2.NOT_FOUND: USAGE,
    code_pb2.UNAVAILABLE: UNAVAILABLE,
}


def exit_code(error: Exception) -> int | None:
    """The command's exit code; None for an error that is a bug."""
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, OSError) and error.filename is not None:
        return FAILED
    if isinstance(error, BatonError):
        return _BY_CODE.get(error.code, FAILED)
    return None


def message(error: Exception) -> str:
    """The error's text, with the time to retry or the options that set a credential."""
    if isinstance(error, UnauthenticatedError):
        return f"{error} (set it by --api-key-file, BATON_API_KEY_FILE or BATON_API_KEY)"
    if isinstance(error, RemoteError) and error.retry_after_s is not None:
        return f"{error} (try again in {error.retry_after_s:.1f} s)"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error) or type(error).__name__
