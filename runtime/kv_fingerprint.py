"""Compares KV cache fingerprints: whether one worker's KV cache fits another worker's engine."""

from __future__ import annotations

from baton.v1 import kv_transfer_pb2


def num_shards(fingerprint: kv_transfer_pb2.KvFingerprint) -> int:
    """Number of different shards of a KV cache among its tensor-parallel ranks."""
    return fingerprint.num_shards or fingerprint.tp_size or 1


def differences(
    ours: kv_transfer_pb2.KvFingerprint, theirs: kv_transfer_pb2.KvFingerprint
) -> list[str]:
    """Fields in which two fingerprints differ, with both values.

    An empty list means that KV caches can be handed over between the workers. The number of ranks
    that hold the same shard is ignored.
    """
    ignored = ("tp_size", "num_shards") if num_shards(ours) == num_shards(theirs) else ()
    return [
        f"{name} is {getattr(theirs, name)!r}, here {getattr(ours, name)!r}"
        for name in (descriptor.name for descriptor in ours.DESCRIPTOR.fields)
        if name not in ignored and getattr(ours, name) != getattr(theirs, name)
    ]
