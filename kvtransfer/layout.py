"""What a KV cache looks like, and where a handoff's bytes lie in staging."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import kv_transfer_pb2

# Of frames and of the meaning of their bytes.
PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True)
class KvLayout:
    """One engine's KV cache, as far as handing it over needs.

    Attributes:
        num_kv_heads: of one rank.
        block_bytes: of one block of one layer on one rank.
        axes: order of a block's axes, as "heads,tokens,content".
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

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def rank_bytes(self, num_blocks: int) -> int:
        """Bytes of one rank's part of a handoff."""
        return self.num_layers * num_blocks * self.block_bytes

    def handoff_bytes(self, num_blocks: int) -> int:
        """Bytes of a whole handoff, all ranks."""
        return self.tp_size * self.rank_bytes(num_blocks)

    def offset(self, rank: int, layer: int, block: int, num_blocks: int) -> int:
        """Where a block's bytes begin inside its handoff."""
        return ((rank * self.num_layers + layer) * num_blocks + block) * self.block_bytes

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
        )


def mismatch(
    ours: kv_transfer_pb2.KvFingerprint, theirs: kv_transfer_pb2.KvFingerprint
) -> str | None:
    """The fields in which two fingerprints differ, with both values; None when equal."""
    differing = [
        f"{descriptor.name} is {getattr(theirs, descriptor.name)!r}, "
        f"here {getattr(ours, descriptor.name)!r}"
        for descriptor in ours.DESCRIPTOR.fields
        if getattr(ours, descriptor.name) != getattr(theirs, descriptor.name)
    ]
    return "; ".join(differing) or None
