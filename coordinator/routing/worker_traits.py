"""Derives the worker properties that placement needs from the worker's Hello message."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.coordinator.routing.latency import LatencyRegistry, WorkerKind
from baton.coordinator.routing.worker_load import WorkerTraits
from baton.runtime import kv_fingerprint
from baton.runtime.latency import LatencyModel
from baton.v1 import cluster_pb2

# Assumed bandwidth between host memory and the device of one rank: less than PCIe 4.0 x16 gives,
# because the blocks of a prompt are not contiguous.
_HOST_BYTES_PER_S = 10e9
# Length of the prompt over which a worker's bytes per token are averaged: windows and recurrent
# states have the same size for every longer prompt.
_TYPICAL_TOKENS = 4096


def block_size_of(hello: cluster_pb2.Hello) -> int:
    """Tokens per KV block."""
    return hello.fingerprint.block_size_tokens or hello.capacity.block_size_tokens or 1


def handoff_bytes(hello: cluster_pb2.Hello, num_tokens: int) -> int:
    """Bytes of a prompt's handoff over all layers and shards."""
    return kv_fingerprint.handoff_bytes(hello.fingerprint, num_tokens)


def traits_of(hello: cluster_pb2.Hello, latency: LatencyRegistry) -> WorkerTraits:
    """Fixed properties of a worker, with a latency model that follows its kind's reports."""
    block_size = block_size_of(hello)
    chunk_tokens = hello.capacity.max_num_batched_tokens or 2048
    typical_tokens = -(-_TYPICAL_TOKENS // block_size) * block_size
    return WorkerTraits(
        latency=_KindModel(latency, WorkerKind.of(hello), chunk_tokens),
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
class _KindModel:
    """Current latency model of a worker kind that computes prompts in chunks."""

    registry: LatencyRegistry
    kind: WorkerKind
    chunk_tokens: int

    @property
    def model(self) -> LatencyModel:
        return self.registry.model(self.kind)

    def prefill_s(self, num_tokens: int) -> float:
        model = self.registry.model(self.kind)
        num_more_steps = (num_tokens - 1) // self.chunk_tokens
        return model.prefill_s(num_tokens) + model.prefill_base_s * num_more_steps

    def decode_step_s(self, num_requests: int, num_kv_tokens: int) -> float:
        return self.registry.model(self.kind).decode_step_s(num_requests, num_kv_tokens)
