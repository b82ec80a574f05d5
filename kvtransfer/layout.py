"""The layout of a KV cache, and the place of each block of a handoff in staging."""

from __future__ import annotations

from dataclasses import dataclass

from baton.runtime import kv_fingerprint
from baton.v1 import kv_transfer_pb2

# Version of the frames and of the meaning of their bytes.
PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The properties of one engine's KV cache that both ends of a handoff must share.

    Attributes:
        num_kv_heads: Number of KV heads of one rank.
        block_bytes: Bytes of one block of one layer on one rank.
        axes: Order of a block's axes, as "heads,tokens,content".
        tp_size: Number of tensor-parallel ranks.
        num_replicas: Number of neighbouring ranks that hold the same keys and values. Such a group
            of ranks is one shard.
    """

    model: str
    revision: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size_tokens: int
    block_bytes: int
    axes: str
    tp_size: int = 1
    num_replicas: int = 1

    @property
    def num_shards(self) -> int:
        """Number of different parts of the cache, each handed over once."""
        return self.tp_size // self.num_replicas

    def num_blocks(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def shard_bytes(self, num_blocks: int) -> int:
        """Returns the size of one shard of a handoff, in bytes."""
        return self.num_layers * num_blocks * self.block_bytes

    def handoff_bytes(self, num_blocks: int) -> int:
        """Returns the size of a whole handoff, all shards, in bytes."""
        return self.num_shards * self.shard_bytes(num_blocks)

    def offset(self, shard: int, layer: int, block: int, num_blocks: int) -> int:
        """Returns the offset of a block inside its handoff, in bytes."""
        return ((shard * self.num_layers + layer) * num_blocks + block) * self.block_bytes

    def fingerprint(self) -> kv_transfer_pb2.KvFingerprint:
        return kv_transfer_pb2.KvFingerprint(
            protocol_version=PROTOCOL_VERSION,
            model=self.model,
            revision=self.revision,
            dtype=self.dtype,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            block_size_tokens=self.block_size_tokens,
            block_bytes=self.block_bytes,
            layout=self.axes,
            tp_size=self.tp_size,
            num_shards=self.num_shards,
        )

    @classmethod
    def from_fingerprint(cls, fingerprint: kv_transfer_pb2.KvFingerprint) -> KvLayout:
        return cls(
            model=fingerprint.model,
            revision=fingerprint.revision,
            dtype=fingerprint.dtype,
            num_layers=fingerprint.num_layers,
            num_kv_heads=fingerprint.num_kv_heads,
            head_size=fingerprint.head_size,
            block_size_tokens=fingerprint.block_size_tokens,
            block_bytes=fingerprint.block_bytes,
            axes=fingerprint.layout,
            tp_size=fingerprint.tp_size,
            num_replicas=fingerprint.tp_size // kv_fingerprint.num_shards(fingerprint),
        )
