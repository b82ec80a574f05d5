"""Time limits of `baton cache drop`, for the processes that take part."""

from __future__ import annotations

# Longest time that a worker takes to delete KV blocks. Large directories take longest.
DROP_TIMEOUT_S = 60.0
