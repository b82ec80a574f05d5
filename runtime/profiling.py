"""What a profile of a worker is bounded by, on its way from the engine to whoever asked for it."""

from __future__ import annotations

DEFAULT_PROFILE_S, LEAST_PROFILE_S, MOST_PROFILE_S = 5.0, 1.0, 60.0
# Of all ranks' traces, compressed: what records more is no use to a viewer either.
MAX_TRACE_BYTES = 256 * 2**20
# One message, and what may be on its way: the worker's outputs go by the same stream.
CHUNK_BYTES, WINDOW_BYTES = 256 * 2**10, 2**20
# A worker that may send no more for so long gives up.
TAKE_TIMEOUT_S = 30.0
