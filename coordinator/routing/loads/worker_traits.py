"""Fixed properties of workers that placement needs, and how a Hello message gives them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from baton.coordinator.routing.loads.latency import LatencyRegistry, WorkerKind
from baton.coordinator.routing.prefixes.prefix_match import HeldPrefix
from baton.coordinator.state.requests import PromptHits, WorkerKey
from baton.runtime.kv import kv_fingerprint
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import cluster_pb2

# Assumed bandwidth between host memory and the device of one rank: less than PCIe 4.0 x16 gives,
# because the blocks of a prompt are not contiguous.
_HOST_BYTES_PER_S = 10e9
# Length of the prompt over which a worker's bytes per token are averaged: windows and recurrent
# states have the same size for every longer prompt.
_TYPICAL_TOKENS = 4096


class Latency(Protocol):
    """Predicted seconds of prefills and decode steps on a worker kind (runtime/steps/latency.py).

    Attributes:
        model: the present model of the worker kind.
        is_measured: whether the costs of both prompts and decodes were measured.
        of_kind: predictions of a typical worker of the kind.
    """

    @property
    def model(self) -> LatencyModel: ...
    @property
    def is_measured(self) -> bool: ...
    @property
    def of_kind(self) -> Latency: ...
    def prefill_s(self, num_tokens: int) -> float: ...
    def decode_step_s(self, num_requests: float, num_kv_tokens: float) -> float: ...


@dataclass(frozen=True, slots=True)
class WorkerTraits:
    """Fixed properties of a worker that routing needs.

    Attributes:
        latency: latency model of the worker's kind; its fit may change while it is used here.
        host_id: workers with equal host IDs share memory.
        kv_tokens: size of the KV cache in tokens.
        host_kv_tokens: size of the KV store in host memory in tokens; 0: none.
        host_bytes_per_s, disk_bytes_per_s: assumed speeds of loads; see TierSpeeds.
        disk_kv_tokens: size of the KV store on disk in tokens; 0: none.
        block_size_tokens: tokens per KV block.
        kv_bytes_per_token: bytes of KV cache per token, over all layers and ranks; 0: not known.
        sends_prefixes: whether the cached beginning of a prompt can be handed over. It cannot for
            sliding windows and recurrent states, which are kept only for a prompt's last tokens.
        max_send_bytes, max_receive_bytes: size of the largest handoff.
        chunk_tokens: maximum number of prompt tokens computed in one step.
        max_seqs: maximum number of requests in one engine step; further requests wait in the
            engine.
    """

    latency: Latency
    host_id: str
    kv_tokens: int
    block_size_tokens: int
    kv_bytes_per_token: int = 0
    chunk_tokens: int = 2048
    max_seqs: int = 2**31
    host_kv_tokens: int = 0
    host_bytes_per_s: float = math.inf
    sends_prefixes: bool = True
    max_send_bytes: int = 2**63
    max_receive_bytes: int = 2**63
    disk_kv_tokens: int = 0
    disk_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("kv_tokens", "block_size_tokens", "chunk_tokens", "max_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; must be at least 1")

    def is_near(self, other: WorkerTraits) -> bool:
        """Whether both workers are on one host, as far as known."""
        return self.host_id == other.host_id

    def reusable_tokens(self, num_tokens: int) -> int:
        """Tokens of a prompt that may come from a cache; see the function `reusable_tokens`."""
        return reusable_tokens(num_tokens, self.block_size_tokens)

    def hits(self, held: HeldPrefix, most_tokens: int) -> PromptHits:
        """The tokens that a held prefix saves, at most `most_tokens`."""
        size = self.block_size_tokens
        num_device = min(held.num_device * size, most_tokens)
        num_stored = min(held.num_total * size, most_tokens) - num_device
        num_disk = min(held.num_disk * size, num_stored)
        return PromptHits(num_device, num_stored - num_disk, num_disk)


def reusable_tokens(num_tokens: int, block_size_tokens: int) -> int:
    """Tokens of a prompt that may come from a cache: whole blocks without the last token.

    A worker always computes the last token, because it yields the first output token.
    """
    return (num_tokens - 1) // block_size_tokens * block_size_tokens


def block_size_of(hello: cluster_pb2.Hello) -> int:
    """Tokens per KV block."""
    return hello.fingerprint.block_size_tokens or hello.capacity.block_size_tokens or 1


def handoff_bytes(hello: cluster_pb2.Hello, num_tokens: int) -> int:
    """Bytes of a prompt's handoff over all layers and shards."""
    return kv_fingerprint.handoff_bytes(hello.fingerprint, num_tokens)


def traits_of(hello: cluster_pb2.Hello, latency: LatencyRegistry) -> WorkerTraits:
    """Fixed properties of a worker, with a latency model that follows its kind's reports."""
    block_size, key = block_size_of(hello), (hello.worker_id, hello.incarnation)
    chunk_tokens = hello.capacity.max_num_batched_tokens or 2048
    typical_tokens = -(-_TYPICAL_TOKENS // block_size) * block_size
    return WorkerTraits(
        latency=_WorkerModel(latency, WorkerKind.of(hello), chunk_tokens, key),
        host_id=hello.host_id,
        kv_tokens=hello.capacity.kv_tokens or 2**31,
        block_size_tokens=block_size,
        kv_bytes_per_token=handoff_bytes(hello, typical_tokens) // typical_tokens,
        chunk_tokens=chunk_tokens,
        max_seqs=hello.capacity.max_num_seqs or 2**31,
        host_kv_tokens=hello.capacity.host_kv_tokens,
        sends_prefixes=kv_fingerprint.keeps_every_token(hello.fingerprint),
        max_send_bytes=hello.capacity.max_send_bytes,
        max_receive_bytes=hello.capacity.max_receive_bytes,
        host_bytes_per_s=_HOST_BYTES_PER_S * kv_fingerprint.num_shards(hello.fingerprint),
        disk_kv_tokens=hello.capacity.disk_kv_tokens,
        disk_bytes_per_s=hello.capacity.disk_bytes_per_s or math.inf,
    )


@dataclass(frozen=True, slots=True)
class _WorkerModel:
    """Current latency model of a worker that computes prompts in chunks.

    Attributes:
        key: the worker; None: a typical worker of the kind.
    """

    registry: LatencyRegistry
    kind: WorkerKind
    chunk_tokens: int
    key: WorkerKey | None

    @property
    def model(self) -> LatencyModel:
        if self.key is None:
            return self.registry.model(self.kind)
        return self.registry.worker_model(self.key, self.kind)

    @property
    def of_kind(self) -> Latency:
        return replace(self, key=None)

    @property
    def is_measured(self) -> bool:
        return self.registry.is_measured(self.kind)

    def prefill_s(self, num_tokens: int) -> float:
        model = self.model
        num_more_steps = (num_tokens - 1) // self.chunk_tokens
        return model.prefill_s(num_tokens) + model.prefill_base_s * num_more_steps

    def decode_step_s(self, num_requests: float, num_kv_tokens: float) -> float:
        return self.model.decode_step_s(num_requests, num_kv_tokens)
