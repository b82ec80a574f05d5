"""vLLM's prefix cache by Baton's block hashes.

vLLM tells what it caches by hashes of its own, which depend on its settings and are made of more
than tokens. Its events carry the tokens too, so that blocks can be named again as the coordinator
names those of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from baton.runtime.block_hashes import block_hashes, root_of

# Of SchedulerStats.kv_connector_stats: what `CachedBlocks.take` returns.
CACHE_CHANGE = "baton_cache"

# vLLM's hash of a block (ExternalBlockHash).
Name: TypeAlias = int | bytes


@dataclass(slots=True)
class _Block:
    """`num_copies`: vLLM may cache equal blocks twice, and tells of each."""

    hash: int
    num_copies: int = 1


class CachedBlocks:
    """Follows vLLM's cache events (vllm/distributed/kv_events.py), in their order.

    Left out are blocks that hold more than tokens, computed with or without an adapter (of images,
    salted prompts), and all that follow them: no hash of a prompt's tokens may find them. Memory is
    bounded by the cache: what it holds, and what of that was not taken yet.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._blocks: dict[Name, _Block] = {}
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._cleared = False

    def stored(
        self,
        parent: Name | None,
        names: Sequence[Name],
        token_ids: Sequence[int],
        extra_keys: Sequence[Sequence[object] | None] | None,
        adapter: str = "",
    ) -> None:
        """Takes in a BlockStored event.

        Args:
            parent: the block before the first of these; None for a prompt's first block.
            names: of blocks that follow each other.
            token_ids: of all of them.
            extra_keys: of each block, what it holds beside tokens; None for nothing.
            adapter: name of that with which they were computed; the first of extra_keys too.
        """
        before = self._blocks.get(parent) if parent is not None else _Block(root_of(adapter))
        if before is None:
            return
        hashes = block_hashes(token_ids, self._block_size_tokens, before.hash)
        if len(hashes) != len(names):
            return
        plain = (adapter,) if adapter else ()
        for index, (name, block_hash) in enumerate(zip(names, hashes, strict=True)):
            if extra_keys is not None and tuple(extra_keys[index] or ()) != plain:
                return
            if (block := self._blocks.get(name)) is not None:
                block.num_copies += 1
                continue
            self._blocks[name] = _Block(block_hash)
            if block_hash in self._removed:
                del self._removed[block_hash]
            else:
                self._stored[block_hash] = None

    def removed(self, names: Sequence[Name]) -> None:
        """Takes in a BlockRemoved event."""
        for name in names:
            if (block := self._blocks.get(name)) is None:
                continue
            block.num_copies -= 1
            if block.num_copies:
                continue
            del self._blocks[name]
            if block.hash in self._stored:
                del self._stored[block.hash]
            else:
                self._removed[block.hash] = None

    def cleared(self) -> None:
        """Takes in an AllBlocksCleared event."""
        self._blocks, self._stored, self._removed = {}, {}, {}
        self._cleared = True

    def take(self) -> dict[str, Any] | None:
        """What has changed since the last time: the fields of engine/base.py's CacheChange."""
        if not (self._stored or self._removed or self._cleared):
            return None
        change = {
            "stored": list(self._stored),
            "removed": list(self._removed),
            "cleared": self._cleared,
        }
        self._stored, self._removed, self._cleared = {}, {}, False
        return change
