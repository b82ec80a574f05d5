"""The deltas of an output that its client was sent last, for a client that resumes."""

from __future__ import annotations

from collections import deque

from baton.v1 import common_pb2

# As many bytes as may wait for the reader of one stream; a slower reader is disconnected.
_MAX_BYTES = 2**20
# Approximate memory of one kept delta beside its bytes.
_DELTA_BYTES = 64


class RecentDeltas:
    """The latest deltas of one output, encoded and in order, at most 1 MiB."""

    def __init__(self) -> None:
        self._deltas: deque[bytes] = deque()
        self._num_bytes = 0

    def add(self, encoded: bytes) -> None:
        self._deltas.append(encoded)
        self._num_bytes += len(encoded) + _DELTA_BYTES
        while self._num_bytes > _MAX_BYTES:
            self._num_bytes -= len(self._deltas.popleft()) + _DELTA_BYTES

    def between(self, known: tuple[int, int], now: tuple[int, int]) -> list[bytes] | None:
        """Returns the deltas that lead from one point of the output to its end.

        Args:
            known: Number of tokens and of characters before the first delta to return.
            now: Number of tokens and of characters of the whole output.

        Returns:
            None if the deltas are not kept any more, or if no delta begins at `known`.
        """
        num_tokens, num_chars = now
        found, earlier = list[bytes](), list(self._deltas)
        while (num_tokens, num_chars) != known:
            if not earlier:
                return None
            found.append(earlier.pop())
            delta = common_pb2.TokenDelta.FromString(found[-1])
            num_tokens, num_chars = num_tokens - len(delta.token_ids), num_chars - len(delta.text)
        return found[::-1]
