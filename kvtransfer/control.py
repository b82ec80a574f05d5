"""The names that workers and engines import to use the transfer service."""

from __future__ import annotations

from baton.kvtransfer.engine_port import (
    Claim,
    EnginePort,
    PendingClaim,
    filled_frame,
    split_blocks,
)
from baton.kvtransfer.errors import ServiceGone, TransferError, TransferRefused
from baton.kvtransfer.frames import checksum
from baton.kvtransfer.transfer_client import HandoffEvent, TransferClient

__all__ = [
    "Claim",
    "EnginePort",
    "HandoffEvent",
    "PendingClaim",
    "ServiceGone",
    "TransferClient",
    "TransferError",
    "TransferRefused",
    "checksum",
    "filled_frame",
    "split_blocks",
]
