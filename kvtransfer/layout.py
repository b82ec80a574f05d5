"""The layout of a KV cache, and the place of each block of a handoff in staging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.runtime.kv import kv_fingerprint, kv_groups
from baton.runtime.kv.kv_groups import KvGroup
from baton.v1 import kv_transfer_pb2

# Version of the frames and of the meaning of their bytes.
PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The properties of one engine's KV cache that both ends of a handoff must share.

    Only the number of pipeline stages may differ, and the number of shards, with which the heads
    and bytes of one rank differ.

    Layers are numbered group by group, a draft's last. A handoff's size is a number of blocks of
    the smallest block size; it determines which blocks of each layer the handoff holds
    (KvGroup.blocks).

    Attributes:
        num_layers: Number of layers of all groups but a draft's.
        num_kv_heads: Number of KV heads of one rank.
        block_size_tokens: Prefixes that the engine finds in its cache are multiples of this.
        block_bytes: Bytes of the largest block of one of these layers on one rank.
        axes: Order of a block's axes, as "heads,tokens,content".
        tp_size: Number of tensor-parallel ranks.
        num_replicas: Number of neighbouring ranks that hold the same keys and values. Such a group
            of ranks is one shard.
        own_groups: Groups of layers; empty if all layers keep every token, in equal blocks.
        draft_revision: Method and weights of a speculative draft with a KV cache of its own; empty
            without one. The two ends of a handoff may differ if one of them has no draft.
        draft_groups: Groups of the draft's layers, which share the block tables of the others.
        pp_size: Number of pipeline stages, among which the layers are divided (stages.py).
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
    own_groups: tuple[KvGroup, ...] = ()
    draft_revision: str = ""
    draft_groups: tuple[KvGroup, ...] = ()
    pp_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all stages."""
        return self.tp_size * self.pp_size

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The groups of all layers, at least one."""
        own = self.own_groups or (
            KvGroup(
                "full",
                self.num_layers,
                self.num_kv_heads,
                self.block_size_tokens,
                self.block_bytes,
            ),
        )
        return own + self.draft_groups

    @property
    def num_all_layers(self) -> int:
        """Number of layers of all groups."""
        return self.num_layers + sum(group.num_layers for group in self.draft_groups)

    @property
    def largest_block_bytes(self) -> int:
        """Bytes of the largest block of any layer on one rank."""
        return max(self.block_bytes, *(group.block_bytes for group in self.groups))

    @property
    def tables(self) -> tuple[KvGroup, ...]:
        """The first group of each of the engine's block tables, in their order."""
        found: dict[int, KvGroup] = {}
        for group in self.groups:
            found.setdefault(group.table, group)
        return tuple(found[table] for table in sorted(found))

    @property
    def keeps_every_token(self) -> bool:
        """Whether all layers keep every token, in blocks of one table."""
        return [table.kind for table in self.tables] == ["full"]

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a recurrent state."""
        return any(group.kind == "state" for group in self.groups)

    @property
    def index_table(self) -> KvGroup:
        """The table whose cached blocks stand for the prefix cache.

        Tables that keep every token are preferred: they lose a prefix last.
        """
        fitting = [
            table for table in self.tables if table.block_size_tokens == self.block_size_tokens
        ]
        return min(fitting or self.tables, key=lambda table: table.kind != "full")

    @property
    def num_shards(self) -> int:
        """Number of shards of the cache, each of which is handed over once."""
        return self.tp_size // self.num_replicas

    @property
    def counted_tokens(self) -> int:
        """Tokens of the blocks in which the size of a handoff is counted."""
        if not self.own_groups:
            return self.block_size_tokens
        return kv_groups.smallest_block(self.own_groups)

    def num_blocks(self, num_tokens: int) -> int:
        """Returns the size of a handoff of this many tokens, in blocks of counted_tokens."""
        return -(-num_tokens // self.counted_tokens)

    def blocks(self, group: KvGroup, num_blocks: int) -> range:
        """Returns the blocks of a group's layers that a handoff of this size holds."""
        return group.blocks(num_blocks, self.counted_tokens)

    def group_of(self, layer: int) -> KvGroup:
        """Returns the group of a layer."""
        return self._place(layer, 0)[0]

    @property
    def token_bytes(self) -> float:
        """Bytes of one token in all layers that keep every token, all shards."""
        return self.num_shards * sum(
            group.num_layers * group.block_bytes / group.block_size_tokens
            for group in self.groups
            if group.kind == "full"
        )

    def shard_blocks(self, num_blocks: int) -> int:
        """Returns the number of blocks of one shard of a handoff, all layers together."""
        return sum(group.num_layers * len(self.blocks(group, num_blocks)) for group in self.groups)

    def shard_bytes(self, num_blocks: int) -> int:
        """Returns the size of one shard of a handoff, in bytes."""
        return kv_groups.shard_bytes(self.groups, num_blocks, self.counted_tokens)

    def handoff_bytes(self, num_blocks: int) -> int:
        """Returns the size of a whole handoff, all shards, in bytes."""
        return self.num_shards * self.shard_bytes(num_blocks)

    def offset(self, shard: int, layer: int, block: int, num_blocks: int) -> int:
        """Returns the offset of a block inside its handoff, in bytes.

        Args:
            shard: Index of the shard.
            layer: Index of the layer.
            block: Index of the block, which the handoff holds, from the handoff's first token on.
            num_blocks: Size of the handoff.
        """
        group, begin, _ = self._place(layer, num_blocks)
        begin += (block - self.blocks(group, num_blocks).start) * group.block_bytes
        return shard * self.shard_bytes(num_blocks) + begin

    def index(self, layer: int, block: int, num_blocks: int) -> int:
        """Returns the index of a block among all blocks of its shard of a handoff."""
        group, _, index = self._place(layer, num_blocks)
        return index + block - self.blocks(group, num_blocks).start

    def _place(self, layer: int, num_blocks: int) -> tuple[KvGroup, int, int]:
        """Returns the group of a layer, and the bytes and blocks before it in its shard."""
        num_bytes, num_before, at = 0, 0, layer
        for group in self.groups:
            num_held = len(self.blocks(group, num_blocks))
            num_layers = min(at, group.num_layers)
            num_bytes += num_layers * num_held * group.block_bytes
            num_before += num_layers * num_held
            if at < group.num_layers:
                return group, num_bytes, num_before
            at -= group.num_layers
        raise IndexError(f"layer is {layer}; must be below {self.num_all_layers}")

    def with_groups(self, groups: Sequence[KvGroup]) -> KvLayout:
        """Returns this layout with the groups that the engine has made of its layers.

        One group whose layers keep every token changes nothing.
        """
        draft = tuple(group for group in groups if group.is_draft)
        if draft != self.draft_groups:
            return replace(self, draft_groups=draft).with_groups(groups)
        groups = [group for group in groups if not group.is_draft]
        if len(groups) == 1 and groups[0] == replace(self, own_groups=()).groups[0]:
            return self
        # A worker that does not know groups must refuse the handoff, whatever the sizes are.
        axes = f"{self.axes.partition(' in groups')[0]} in groups"
        return replace(
            self,
            num_layers=sum(group.num_layers for group in groups),
            num_kv_heads=groups[0].num_kv_heads,
            block_size_tokens=kv_groups.common_block(groups),
            block_bytes=max(group.block_bytes for group in groups),
            axes=axes,
            own_groups=tuple(groups),
        )

    def split_into(self, num_shards: int) -> KvLayout:
        """Returns the layout of the same cache in another number of shards, one rank for each.

        Raises:
            ValueError: The cache cannot be divided into so many shards.
        """
        if num_shards == self.num_shards:
            return self
        groups = kv_groups.split(self.groups, self.num_shards, num_shards)
        if groups is None:
            raise ValueError(
                f"num_shards is {num_shards}; a cache in {self.num_shards} shards of "
                f"{self.num_kv_heads} KV heads cannot be divided so"
            )
        return replace(
            self,
            num_kv_heads=groups[0].num_kv_heads,
            block_bytes=max(group.block_bytes for group in groups if not group.is_draft),
            tp_size=num_shards,
            num_replicas=1,
            own_groups=tuple(one for one in groups if not one.is_draft) if self.own_groups else (),
            draft_groups=tuple(one for one in groups if one.is_draft),
        )

    def without_draft(self) -> KvLayout:
        """Returns the layout of the same cache without the layers of a draft."""
        return replace(self, draft_revision="", draft_groups=())

    def sent_by(self, sender: kv_transfer_pb2.KvFingerprint) -> KvLayout:
        """Returns the layout of handoffs from a worker whose cache fits this one.

        Raises:
            ValueError: The cache cannot be divided into the sender's number of shards.
        """
        made = self.without_draft().split_into(kv_fingerprint.num_shards(sender))
        if not sender.draft_revision:
            return made
        return replace(
            made,
            draft_revision=sender.draft_revision,
            draft_groups=tuple(kv_fingerprint.draft_groups(sender)),
        )

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
            layout=kv_fingerprint.axes_with_draft(self.axes) if self.draft_revision else self.axes,
            tp_size=self.tp_size,
            num_shards=self.num_shards,
            groups=[kv_fingerprint.group_message(group) for group in self.own_groups],
            draft_groups=[kv_fingerprint.group_message(group) for group in self.draft_groups],
            draft_revision=self.draft_revision,
            # The field is left out for one stage: disks of earlier versions name their files so.
            pp_size=self.pp_size if self.pp_size > 1 else 0,
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
            axes=kv_fingerprint.without_draft(fingerprint).layout,
            tp_size=fingerprint.tp_size,
            num_replicas=fingerprint.tp_size // kv_fingerprint.num_shards(fingerprint),
            own_groups=tuple(kv_fingerprint.own_groups(fingerprint)),
            draft_revision=fingerprint.draft_revision,
            draft_groups=tuple(kv_fingerprint.draft_groups(fingerprint)),
            pp_size=fingerprint.pp_size or 1,
        )
