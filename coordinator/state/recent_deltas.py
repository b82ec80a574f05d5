"""What the client of an output was sent lately, for when it comes back and lacks some of it."""

from __future__ import annotations

from collections import deque

from baton.v1 import common_pb2

# As much as may wait for the reader of one stream: who lacks more has been given up.
_MAX_BYTES = 2**20
# What keeping one takes beside its bytes, about.
_DELTA_BYTES = 64


class RecentDeltas:
    """The latest deltas of one output, encoded and in order."""

    def __init__(self) -> None:
        self._deltas: deque[bytes] = deque()
        self._num_bytes = 0

    def add(self, encoded: bytes) -> None:
        self._deltas.append(encoded)
        self._num_bytes += len(encoded) + _DELTA_BYTES
        while self._num_bytes > _MAX_BYTES:
            self._num_bytes -= len(self._deltas.popleft()) + _DELTA_BYTES

    def between(self, known: tuple[int, int], now: tuple[int, int]) -> list[bytes] | None:
        """The deltas that lead from one point of the output to its end.

        Args:
            known: how many tokens and characters come before them.
            now: how many there are.

        Returns:
            None when they are not kept any more, or none begins there.
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
