"""Limits of a worker profile on its way from the engine to the operator."""

from __future__ import annotations

DEFAULT_PROFILE_S, LEAST_PROFILE_S, MOST_PROFILE_S = 5.0, 1.0, 60.0
# Limit of the compressed traces of all ranks; a viewer could not open a larger one either.
MAX_TRACE_BYTES = 256 * 2**20
# Size of one message, and bytes in flight; the worker's outputs share the stream.
CHUNK_BYTES, WINDOW_BYTES = 256 * 2**10, 2**20
# A worker that cannot send the next chunk for this long gives up.
TAKE_TIMEOUT_S = 30.0
