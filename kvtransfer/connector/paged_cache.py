"""A rank's paged KV cache as blocks of words.

Staging holds a block as [heads, tokens, content], contiguous, whatever the strides of the cache: a
copy follows the cache's logical axes, so that the order of a block's axes in staging
(`KvLayout.axes`) does not depend on how the engine lays out its memory. vLLM 0.32 gives every
backend's cache as [blocks, heads, tokens, content] per layer and hides its layout in the strides
(vllm/v1/kv_cache_layout.py): [L, B, H, N, C] on the CPU, [L, B, N, H, C] with FlashAttention,
blocks before layers where a layer's blocks are packed with those of the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from baton.kvtransfer.layout import KvLayout

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def block_view(name: str, cache: torch.Tensor, layout: KvLayout) -> torch.Tensor:
    """A layer's cache as [blocks, heads, parts of a block, tokens of a part, content].

    A kernel that takes smaller blocks than the scheduler hands out has each cut into parts, one
    after the other on the first axis; otherwise a block is one part.

    Raises:
        ValueError: it is not [blocks, heads, tokens, content] as the layout says.
    """
    heads, block_size, expected = layout.num_kv_heads, layout.block_size_tokens, layout.block_bytes
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


class PagedCache:
    """One rank's cache as blocks of words: what is copied has no other meaning here.

    Attributes:
        layers: per layer a view [blocks, ...] of the engine's memory.
        indices: of the layers, by the engine's names.
        word: what a block is moved in: the widest integer that divides and aligns all of it.

    Raises:
        ValueError: not as many layers as announced, one that is laid out differently, or layers on
            several devices.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], layout: KvLayout) -> None:
        if len(kv_caches) != layout.num_layers:
            raise ValueError(
                f"the cache has {len(kv_caches)} layers; announced {layout.num_layers}"
            )
        devices = {cache.device for cache in kv_caches.values()}
        if len(devices) != 1:
            raise ValueError(
                f"the cache is on {', '.join(sorted(map(str, devices)))}; Baton needs it on one"
            )
        views = [block_view(name, cache, layout) for name, cache in kv_caches.items()]
        self.device = devices.pop()
        self.block_bytes = layout.block_bytes
        self.indices = {name: index for index, name in enumerate(kv_caches)}
        self.word = next(word for word in _WORDS if all(_is_made_of(view, word) for view in views))
        self.layers = [view.view(self.word) for view in views]
        if all(layer[0].is_contiguous() for layer in self.layers):
            # [blocks, words]: the faster to copy.
            self.layers = [layer.flatten(1) for layer in self.layers]

    def clear(self, block_ids: torch.Tensor) -> None:
        """Fills blocks of every layer with zeros."""
        for layer in self.layers:
            layer.index_fill_(0, block_ids, 0)

    @property
    def block_words(self) -> int:
        return self.block_bytes // int(self.word.itemsize)

    def rows(self, words: torch.Tensor) -> torch.Tensor:
        """Contiguous words of whole blocks, shaped as the layers are."""
        return words.view(-1, *self.layers[0].shape[1:])

    def words(self, staging: torch.Tensor) -> torch.Tensor:
        """Bytes as words; a remainder at the end is left out."""
        size = int(self.word.itemsize)
        return staging[: staging.numel() // size * size].view(self.word)

    def word_range(self, offset: int, num_blocks: int) -> slice:
        """Where blocks at an offset of staging are, in words."""
        start = offset // int(self.word.itemsize)
        return slice(start, start + num_blocks * self.block_words)


def _is_made_of(view: torch.Tensor, word: torch.dtype) -> bool:
    old, new = view.element_size(), int(word.itemsize)
    distances = [stride * old for stride in view.stride()[:-1]]
    ends = [view.data_ptr(), view.storage_offset() * old, view.shape[-1] * old]
    return new >= old and all(each % new == 0 for each in distances + ends)
