"""The paged KV cache of a simulated engine: who holds which block."""

from __future__ import annotations


class BlockPool:
    """Blocks, each free or held by one request.

    Args:
        num_blocks: in all.
        block_size_tokens: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        self.num_blocks, self._block_size = num_blocks, block_size_tokens
        self._free = list(range(num_blocks))
        self._held: dict[str, list[int]] = {}

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_used_tokens(self) -> int:
        return self.num_used_blocks * self._block_size

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Makes a request hold enough blocks for `num_tokens`; False, and nothing, without room."""
        held = self._held.get(request_id, [])
        missing = -(-num_tokens // self._block_size) - len(held)
        if missing > len(self._free):
            return False
        if missing > 0:
            held = self._held.setdefault(request_id, held)
            held.extend(self._free[-missing:])
            del self._free[-missing:]
        return True

    def free(self, request_id: str) -> None:
        """Takes back all a request holds, if anything."""
        self._free.extend(self._held.pop(request_id, ()))

    def check_integrity(self) -> None:
        """Raises RuntimeError when a block is lost or held twice."""
        every = [*self._free, *(block for held in self._held.values() for block in held)]
        if sorted(every) != list(range(self.num_blocks)):
            raise RuntimeError("KV blocks were lost or given out twice")
