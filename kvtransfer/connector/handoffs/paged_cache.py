"""Views a rank's paged KV cache as blocks of words.

Staging holds a block as contiguous [heads, tokens, content], whatever the strides of the cache are.
A copy follows the cache's logical axes, so the order of a block's axes in staging (`KvLayout.axes`)
does not depend on the engine's memory layout. vLLM 0.32 shows every backend's cache as [blocks,
heads, tokens, content] per layer and hides its layout in the strides (vllm/v1/kv_cache_layout.py):
[L, B, H, N, C] on the CPU, [L, B, N, H, C] with FlashAttention, and blocks before layers where the
blocks of several layers are packed together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

import torch

from baton.kvtransfer.head_ranges import HeadRange
from baton.kvtransfer.layout import KvLayout
from baton.runtime.kv.kv_groups import KvGroup

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def block_view(name: str, cache: torch.Tensor, group: KvGroup) -> torch.Tensor:
    """Returns a layer's cache as [blocks, heads, parts of a block, tokens of a part, content].

    A kernel that takes smaller blocks than the scheduler's has each block cut into parts, one after
    the other on the first axis. Otherwise a block is one part. A recurrent state counts as one
    token.

    Raises:
        ValueError: The cache is not [blocks, heads, tokens, content] as its group says.
    """
    heads, expected = group.num_kv_heads, group.block_bytes
    block_size = group.block_size_tokens if group.kind != "state" else 1
    parts = block_size // cache.shape[2] if cache.ndim == 4 and cache.shape[2] else 0
    fits = (
        parts > 0
        and parts * cache.shape[2] == block_size
        and cache.shape[0] % parts == 0
        and cache.shape[1] == heads
        and heads * block_size * cache.shape[3] * cache.element_size() == expected
        and cache.stride(3) == 1
    )
    if not fits:
        raise ValueError(
            f"the cache of {name} has shape {list(cache.shape)}, strides {list(cache.stride())} "
            f"and type {cache.dtype}; Baton needs [blocks, {heads} heads, {block_size} tokens, "
            f"content] with {expected} bytes per block, and content contiguous"
        )
    return cache.unflatten(0, (cache.shape[0] // parts, parts)).transpose(1, 2)


def page_layout(kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> str:
    """Describes how the bytes of a rank's blocks are arranged, whose raw pages a disk keeps.

    The description is the same in every process whose pages can be exchanged. vLLM chooses the
    arrangement when the engine starts, by the attention kernel and VLLM_KV_CACHE_LAYOUT. The
    number of blocks is no part of it.

    Args:
        kv_caches: The layers' caches, each [blocks or parts of blocks, ...], by the engine's names
            and in the order of their pages.
        num_blocks: Number of blocks of the cache.
    """
    layers = []
    for name, cache in kv_caches.items():
        size, parts = cache.element_size(), max(1, cache.shape[0] // num_blocks)
        strides = [stride * size for stride in cache.stride()]
        # Where blocks of several layers are packed together, each layer has its place in them.
        # Elsewhere a layer's place in memory depends on the number of blocks before it.
        distance, block_bytes = parts * strides[0], parts * cache[0].numel() * size
        begin = cache.storage_offset() * size % distance if distance > block_bytes else 0
        layers.append([name, str(cache.dtype), parts, list(cache.shape[1:]), strides, begin])
    return json.dumps(layers)


class PagedCache:
    """One rank's cache as blocks of words.

    Args:
        kv_caches: The layers' caches by the engine's names, in the order of the layout.
        layout: Layout of the cache.
        layers: Indices in the layout of the layers that the rank holds; None: it holds all.

    Attributes:
        device: Device of the cache.
        largest_block_bytes: Bytes of the largest block of one layer.
        groups: For each layer that the rank holds, its group.
        layers: For each of these layers a view [blocks, ...] of the engine's memory.
        indices: Index of each of these layers, by the engine's name.
        word: The widest integer type that divides and aligns every part of a block.

    Raises:
        ValueError: The number or the layout of the layers differs from the fingerprint, or the
            layers are on several devices.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        layout: KvLayout,
        layers: Sequence[int] | None = None,
    ) -> None:
        held = range(layout.num_all_layers) if layers is None else layers
        if len(kv_caches) != len(held):
            raise ValueError(
                f"the cache has {len(kv_caches)} layers; the fingerprint has {len(held)}"
            )
        devices = {cache.device for cache in kv_caches.values()}
        if len(devices) != 1:
            raise ValueError(
                f"the cache is on {', '.join(sorted(map(str, devices)))}; Baton needs it on one"
            )
        self.groups = {layer: layout.group_of(layer) for layer in held}
        views = [
            block_view(name, cache, group)
            for (name, cache), group in zip(kv_caches.items(), self.groups.values(), strict=True)
        ]
        self.device = devices.pop()
        self.largest_block_bytes = layout.largest_block_bytes
        self.indices = dict(zip(kv_caches, held, strict=True))
        self.word = next(word for word in _WORDS if all(_is_made_of(view, word) for view in views))
        of_words = [view.view(self.word) for view in views]
        # Two-dimensional tensors are faster to copy.
        self.layers = {
            layer: words.flatten(1) if words[0].is_contiguous() else words
            for layer, words in zip(held, of_words, strict=True)
        }

    def cleared(self, *, only_draft: bool = False) -> Iterator[torch.Tensor]:
        """Yields every layer, or a draft's layers, for blocks that are filled with zeros.

        Groups share the cache's memory: a block belongs to one of them at a time.
        """
        for layer, words in self.layers.items():
            if self.groups[layer].is_draft or not only_draft:
                yield words

    def block_words(self, layer: int) -> int:
        """Returns the number of words of one block of a layer."""
        return self.groups[layer].block_bytes // int(self.word.itemsize)

    def view(self, layer: int, heads: HeadRange | None) -> torch.Tensor:
        """Returns a layer, or [blocks, heads of the range, ...] of it."""
        view = self.layers[layer]
        if heads is None:
            return view
        if view.ndim == 2:
            view = view.unflatten(1, (self.groups[layer].num_kv_heads, -1))
        return view[:, heads.first : heads.first + heads.num_heads]

    def staged_words(self, layer: int, heads: HeadRange | None) -> tuple[int, int]:
        """Returns the number of words of a sender's block, and of the wanted heads in it."""
        size = self.block_words(layer)
        if heads is None:
            return size, size
        size //= self.groups[layer].num_kv_heads
        return heads.num_staged * size, heads.num_heads * size

    def rows(self, layer: int, words: torch.Tensor, heads: HeadRange | None = None) -> torch.Tensor:
        """Returns a `word_range` of the same heads in the shape of `view`."""
        shape = self.view(layer, heads).shape[1:]
        if heads is None:
            return words.view(-1, *shape)
        block, wanted = self.staged_words(layer, heads)
        num_blocks = 1 + (len(words) - wanted) // block
        return words.as_strided((num_blocks, wanted), (block, 1)).unflatten(1, shape)

    def words(self, staging: torch.Tensor) -> torch.Tensor:
        """Returns bytes as words, without a remainder at the end."""
        size = int(self.word.itemsize)
        return staging[: staging.numel() // size * size].view(self.word)

    def word_range(
        self, layer: int, offset: int, num_blocks: int, heads: HeadRange | None = None
    ) -> slice:
        """Returns the range of words of a layer's blocks that begin at an offset of staging.

        With `heads`, it goes from the wanted heads of the first block to those of the last one, and
        includes the heads between them that are not wanted.
        """
        start, (block, wanted) = offset // int(self.word.itemsize), self.staged_words(layer, heads)
        if heads is not None:
            start += heads.first_staged * (wanted // heads.num_heads)
        return slice(start, start + (num_blocks - 1) * block + wanted)


def _is_made_of(view: torch.Tensor, word: torch.dtype) -> bool:
    old, new = view.element_size(), int(word.itemsize)
    distances = [stride * old for stride in view.stride()[:-1]]
    ends = [view.data_ptr(), view.storage_offset() * old, view.shape[-1] * old]
    return new >= old and all(each % new == 0 for each in distances + ends)
