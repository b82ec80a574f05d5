"""Translates vLLM's prefix cache to Baton's block hashes.

vLLM reports cached blocks by its own hashes, which depend on its settings and on more than tokens.
Its events also carry the tokens, so this module can name the blocks as the coordinator names the
blocks of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from baton.runtime.block_hashes import block_hashes, root_of

# Key in SchedulerStats.kv_connector_stats; the value is the result of `CachedBlocks.take`.
CACHE_CHANGE = "baton_cache"

# vLLM's hash of a block (ExternalBlockHash).
Name: TypeAlias = int | bytes


@dataclass(slots=True)
class _Block:
    """A cached block.

    Attributes:
        hash: Baton's hash.
        num_copies: Number of equal blocks; vLLM may cache a block twice, and reports each copy.
    """

    hash: int
    num_copies: int = 1


class CachedBlocks:
    """Follows vLLM's cache events (vllm/distributed/kv_events.py) in their order.

    Blocks that depend on more than tokens and the adapter (images, salted prompts) are left out,
    with all blocks behind them, because the hash of a prompt's tokens must not find them. Memory is
    bounded by the size of the cache.
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
        """Takes a BlockStored event.

        Args:
            parent: vLLM's hash of the block before the first one; None for a prompt's first block.
            names: vLLM's hashes of consecutive blocks.
            token_ids: Tokens of all these blocks.
            extra_keys: For each block, the keys that it depends on beside tokens; None: none.
            adapter: Name of the adapter, which is also the first of the extra keys.
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
        """Takes a BlockRemoved event."""
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
        """Takes an AllBlocksCleared event."""
        self._blocks, self._stored, self._removed = {}, {}, {}
        self._cleared = True

    def take(self) -> dict[str, Any] | None:
        """Returns the changes since the last call as fields of CacheChange (engine/base.py)."""
        if not (self._stored or self._removed or self._cleared):
            return None
        change = {
            "stored": list(self._stored),
            "removed": list(self._removed),
            "cleared": self._cleared,
        }
        self._stored, self._removed, self._cleared = {}, {}, False
        return change
