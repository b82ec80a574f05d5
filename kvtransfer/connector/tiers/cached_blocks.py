"""Translates vLLM's prefix cache, and the host memory below it, to Baton's block hashes.

vLLM reports cached blocks by its own hashes, which depend on its settings and on more than tokens.
Its events also carry the tokens, so this module can name the blocks as the coordinator names the
blocks of a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.kvtransfer.block_changes import BlockChanges, CacheChange
from baton.kvtransfer.disk.orders import BlockName, BlockSelection, owner_of
from baton.runtime.prompts.block_hashes import block_hashes, root_of
from baton.runtime.prompts.prompt_images import ImageKey

# vLLM's hash of a block (ExternalBlockHash).
Name: TypeAlias = int | bytes


@dataclass(slots=True)
class _Block:
    """A block whose hash is known.

    Attributes:
        hash: Baton's hash.
        owner: Name that all blocks with the same salt share (disk/orders.py).
        parent: Baton's hash of the block before it; 0: there is none, or it is not known.
        num_copies: Number of equal blocks in the cache; vLLM may cache a block twice, and reports
            each copy. 0: only host memory has the block, or gets it.
    """

    hash: int
    owner: str
    parent: int
    num_copies: int = 0


class CachedBlocks:
    """Follows vLLM's cache events (vllm/distributed/kv_events.py) in their order.

    Blocks that depend on more than tokens, images, the adapter and the salt are left out, with all
    blocks after them, because the hash of a prompt must not find them. Memory is bounded by the
    size of the cache and of the host memory.

    The methods about host memory take vLLM's hashes of blocks that were in the cache when their
    copy was ordered.
    """

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size_tokens = block_size_tokens
        self._blocks: dict[Name, _Block] = {}
        self._changes, self._host_changes = BlockChanges(), BlockChanges()
        # Blocks in host memory (True) and on their way there (False).
        self._in_host: dict[Name, bool] = {}

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
        if not names:
            return
        every = [tuple(each or ()) for each in extra_keys or [()] * len(names)]
        images = [_images(each) for each in every]
        keys = [tuple(key for key in each if not isinstance(key, tuple)) for each in every]
        plain = (adapter,) if adapter else ()
        if parent is None:
            salt, keys[0] = _salt(keys[0], plain)
            before, parent_hash, owner = root_of(adapter, salt), 0, owner_of(salt)
        elif (found := self._blocks.get(parent)) is not None:
            before = parent_hash = found.hash
            owner = found.owner
        else:
            return
        if len(token_ids) // self._block_size_tokens != len(names):
            return
        hashes = block_hashes(token_ids, self._block_size_tokens, before, images)
        for name, block_hash, extra in zip(names, hashes, keys, strict=True):
            if extra != plain:
                return
            if (block := self._blocks.get(name)) is None:
                block = self._blocks[name] = _Block(block_hash, owner, parent_hash)
                if self._in_host.get(name):
                    # It was not known when it arrived there: its parent was deleted before.
                    self._host_changes.store(block_hash)
            block.num_copies += 1
            if block.num_copies == 1:
                self._changes.store(block_hash)
            parent_hash = block_hash

    def removed(self, names: Sequence[Name]) -> None:
        """Takes a BlockRemoved event."""
        for name in names:
            if (block := self._blocks.get(name)) is None or not block.num_copies:
                continue
            block.num_copies -= 1
            if not block.num_copies:
                self._changes.remove(block.hash)
                self._forget_unused(name)

    def cleared(self) -> None:
        """Takes an AllBlocksCleared event."""
        self._changes.clear()
        for name in list(self._blocks):
            self._blocks[name].num_copies = 0
            self._forget_unused(name)

    def take(self) -> CacheChange | None:
        """Returns the cache's changes since the last call; None for no change."""
        return self._changes.take()

    # ---- Host memory

    def described(self, name: Name) -> tuple[int, str, int] | None:
        """Returns Baton's hash of a block, its owner and its parent; None if it is not known."""
        block = self._blocks.get(name)
        return (block.hash, block.owner, block.parent) if block is not None else None

    def is_selected(self, name: Name, selection: BlockSelection) -> bool:
        """Returns whether a selection includes a block; a block that is not known may be any."""
        block = self._blocks.get(name)
        return block is None or selection.includes(block.hash, block.owner)

    def parents(self) -> Iterator[tuple[int, int]]:
        """Yields the hashes of the blocks that are known, and of the blocks before them."""
        return ((block.hash, block.parent) for block in self._blocks.values())

    def come_from_disk(self, name: Name, block: BlockName) -> None:
        """Notes that a block that was on disk is being loaded to host memory."""
        self._in_host[name] = False
        self._blocks.setdefault(name, _Block(block.hash, block.owner, block.parent))

    def go_to_host(self, names: Iterable[Name]) -> None:
        """Notes that blocks are being copied to host memory."""
        for name in names:
            self._in_host[name] = False

    def arrive_in_host(self, names: Iterable[Name]) -> None:
        """Notes that host memory holds blocks."""
        for name in names:
            self._in_host[name] = True
            if (block := self._blocks.get(name)) is not None:
                self._host_changes.store(block.hash)

    def leave_host(self, names: Iterable[Name]) -> None:
        """Notes that host memory no longer holds, or does not get, blocks."""
        for name in names:
            was_there = self._in_host.pop(name, False)
            if (block := self._blocks.get(name)) is not None:
                if was_there:
                    self._host_changes.remove(block.hash)
                self._forget_unused(name)

    def clear_host(self) -> None:
        """Notes that host memory holds nothing."""
        self._host_changes.clear()
        names, self._in_host = list(self._in_host), {}
        for name in names:
            self._forget_unused(name)

    def take_host(self) -> CacheChange | None:
        """Returns host memory's changes since the last call; None for no change."""
        return self._host_changes.take()

    def _forget_unused(self, name: Name) -> None:
        """Forgets a block that is neither in the cache nor in host memory, nor on its way there."""
        block = self._blocks.get(name)
        if block is not None and not block.num_copies and name not in self._in_host:
            del self._blocks[name]


def _images(keys: tuple[object, ...]) -> list[ImageKey]:
    """Returns the images among the extra keys of a block, which are vLLM's only pairs.

    Source: to_event_extra_keys in vllm/v1/core/kv_cache_utils.py.
    """
    return [(str(key[0]), int(key[1])) for key in keys if isinstance(key, tuple)]


def _salt(keys: tuple[object, ...], plain: tuple[str, ...]) -> tuple[str, tuple[object, ...]]:
    """Returns the salt among the extra keys of a prompt's first block, and the other keys.

    vLLM reports the salt as a text after the adapter's name.
    """
    match keys:
        case (*others, str(salt)) if tuple(others) == plain:
            return salt, plain
    return "", keys
