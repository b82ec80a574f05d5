"""Checks of the fingerprint with which the worker configures its transfer service."""

from __future__ import annotations

from baton.kvtransfer.errors import TransferRefused
from baton.kvtransfer.frames import MAX_PAYLOAD_BYTES
from baton.kvtransfer.layout import PROTOCOL_VERSION, KvLayout
from baton.runtime.kv import kv_fingerprint
from baton.v1 import kv_transfer_pb2 as pb


def check_fingerprint(fingerprint: pb.KvFingerprint, layout: KvLayout) -> None:
    """Raises TransferRefused when the service cannot hand over a cache of this layout."""
    if fingerprint.protocol_version != PROTOCOL_VERSION:
        raise TransferRefused(
            f"fingerprint.protocol_version is {fingerprint.protocol_version}; "
            f"must be {PROTOCOL_VERSION}"
        )
    for name in ("num_layers", "block_size_tokens", "block_bytes", "tp_size"):
        if getattr(layout, name) < 1:
            raise TransferRefused(f"fingerprint.{name} is 0; must be at least 1")
    if fingerprint.pp_size > fingerprint.num_layers:
        raise TransferRefused(
            f"fingerprint.pp_size is {fingerprint.pp_size}; must be at most num_layers, "
            f"{fingerprint.num_layers}"
        )
    if fingerprint.tp_size % kv_fingerprint.num_shards(fingerprint):
        raise TransferRefused(
            f"fingerprint.num_shards is {fingerprint.num_shards}; must divide tp_size, "
            f"{fingerprint.tp_size}"
        )
    if layout.largest_block_bytes > MAX_PAYLOAD_BYTES:
        raise TransferRefused(
            f"fingerprint.block_bytes is {layout.largest_block_bytes}; at most {MAX_PAYLOAD_BYTES}"
        )
