"""Compares KV cache fingerprints: whether one worker's KV cache fits another worker's engine."""

from __future__ import annotations

from typing import Any

from baton.runtime.kv import kv_groups
from baton.runtime.kv.kv_groups import Kind, KvGroup
from baton.v1 import kv_transfer_pb2

_KINDS: dict[Kind, kv_transfer_pb2.KvGroup.Kind.ValueType] = {
    "full": kv_transfer_pb2.KvGroup.KIND_FULL,
    "window": kv_transfer_pb2.KvGroup.KIND_WINDOW,
    "state": kv_transfer_pb2.KvGroup.KIND_STATE,
}
_NAMES = {value: name for name, value in _KINDS.items()}
# End of `layout` in the fingerprint of a cache with a draft. A worker that does not know drafts
# must refuse the handoff, whatever the sizes are.
_WITH_DRAFT = ", with a draft"


def num_shards(fingerprint: kv_transfer_pb2.KvFingerprint) -> int:
    """Number of different shards of a KV cache among its tensor-parallel ranks."""
    return fingerprint.num_shards or fingerprint.tp_size or 1


def num_ranks(fingerprint: kv_transfer_pb2.KvFingerprint) -> int:
    """Number of ranks of an engine; 0 if it has no KV cache."""
    return fingerprint.tp_size * (fingerprint.pp_size or 1)


def group_message(group: KvGroup) -> kv_transfer_pb2.KvGroup:
    """Returns a group of layers as a fingerprint carries it."""
    return kv_transfer_pb2.KvGroup(
        kind=_KINDS[group.kind],
        num_layers=group.num_layers,
        num_kv_heads=group.num_kv_heads,
        block_size_tokens=group.block_size_tokens,
        block_bytes=group.block_bytes,
        window_tokens=group.window_tokens,
        table=group.table,
    )


def own_groups(fingerprint: kv_transfer_pb2.KvFingerprint) -> list[KvGroup]:
    """Returns the groups of layers; empty if all layers keep every token, in equal blocks.

    A kind that this version does not know counts as one that keeps every token, the largest. Only
    the coordinator meets such kinds: workers refuse a fingerprint that is not their own.
    """
    return [_group(message) for message in fingerprint.groups]


def draft_groups(fingerprint: kv_transfer_pb2.KvFingerprint) -> list[KvGroup]:
    """Returns the groups of a draft's layers; empty without a draft."""
    return [_group(message, is_draft=True) for message in fingerprint.draft_groups]


def axes_with_draft(axes: str) -> str:
    """Returns the `layout` of a fingerprint with a draft, from that without one."""
    return axes + _WITH_DRAFT


def without_draft(fingerprint: kv_transfer_pb2.KvFingerprint) -> kv_transfer_pb2.KvFingerprint:
    """Returns the fingerprint of the same cache without the layers of a draft."""
    made = kv_transfer_pb2.KvFingerprint()
    made.CopyFrom(fingerprint)
    made.layout = made.layout.removesuffix(_WITH_DRAFT)
    made.ClearField("draft_groups")
    made.ClearField("draft_revision")
    return made


def _groups(fingerprint: kv_transfer_pb2.KvFingerprint) -> list[KvGroup]:
    """Returns the groups of all layers, at least one."""
    own = own_groups(fingerprint) or [
        KvGroup(
            "full",
            fingerprint.num_layers,
            fingerprint.num_kv_heads,
            fingerprint.block_size_tokens or 1,
            fingerprint.block_bytes,
        )
    ]
    return own + draft_groups(fingerprint)


def _group(message: kv_transfer_pb2.KvGroup, *, is_draft: bool = False) -> KvGroup:
    return KvGroup(
        _NAMES.get(message.kind, "full"),
        message.num_layers,
        message.num_kv_heads,
        message.block_size_tokens or 1,
        message.block_bytes,
        message.window_tokens,
        message.table,
        is_draft,
    )


def keeps_states(fingerprint: kv_transfer_pb2.KvFingerprint) -> bool:
    """Returns whether some layers keep a recurrent state, which belongs to one token only."""
    return any(group.kind == kv_transfer_pb2.KvGroup.KIND_STATE for group in fingerprint.groups)


def keeps_every_token(fingerprint: kv_transfer_pb2.KvFingerprint) -> bool:
    """Returns whether all layers keep the keys and values of every token, in one block table."""
    full = kv_transfer_pb2.KvGroup.KIND_FULL
    return all(group.kind == full and not group.table for group in fingerprint.groups)


def handoff_bytes(fingerprint: kv_transfer_pb2.KvFingerprint, num_tokens: int) -> int:
    """Returns the size of a prompt's handoff, all layers and shards, in bytes."""
    groups = _groups(fingerprint)
    counted = kv_groups.smallest_block([group for group in groups if not group.is_draft])
    num_blocks = -(-num_tokens // counted)
    return num_shards(fingerprint) * kv_groups.shard_bytes(groups, num_blocks, counted)


def differences(
    ours: kv_transfer_pb2.KvFingerprint, theirs: kv_transfer_pb2.KvFingerprint
) -> list[str]:
    """Fields in which two fingerprints differ, with both values.

    An empty list means that KV caches can be handed over between the workers: both divide the same
    cache, by its heads, among their ranks. The number of ranks that hold the same shard and the
    number of pipeline stages are ignored, and so is a draft that only one of the workers has.
    """
    if not (ours.draft_revision and theirs.draft_revision):
        ours, theirs = without_draft(ours), without_draft(theirs)
    ignored: tuple[str, ...] = ()
    if num_shards(ours) == num_shards(theirs):
        ignored = ("tp_size", "num_shards")
    elif _are_parts_of_one_cache(ours, theirs):
        ignored = (
            "tp_size",
            "num_shards",
            "num_kv_heads",
            "block_bytes",
            "groups",
            "draft_groups",
        )
    return [
        f"{name} is {_shown(theirs, name)}, here {_shown(ours, name)}"
        for name in (descriptor.name for descriptor in ours.DESCRIPTOR.fields)
        if name not in (*ignored, "pp_size") and getattr(ours, name) != getattr(theirs, name)
    ]


def _are_parts_of_one_cache(
    ours: kv_transfer_pb2.KvFingerprint, theirs: kv_transfer_pb2.KvFingerprint
) -> bool:
    """Returns whether shards of two sizes together have the same heads, in every group."""
    if any(group.kind not in _NAMES for group in (*theirs.groups, *theirs.draft_groups)):
        return False
    as_ours = kv_groups.split(_groups(theirs), num_shards(theirs), num_shards(ours))
    sizes = [one.block_bytes * num_shards(one) for one in (ours, theirs)]
    return as_ours == _groups(ours) and sizes[0] == sizes[1]


def _shown(fingerprint: kv_transfer_pb2.KvFingerprint, name: str) -> str:
    value: Any = getattr(fingerprint, name)
    if name not in ("groups", "draft_groups"):
        return repr(value)
    shown = [
        f"{group.num_layers} layers {kv_transfer_pb2.KvGroup.Kind.Name(group.kind)} of "
        f"{group.block_size_tokens} tokens, {group.block_bytes} bytes, "
        f"window {group.window_tokens}, table {group.table}"
        for group in value
    ]
    return f"[{'; '.join(shown)}]"
