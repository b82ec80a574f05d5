"""Errors of the handoff, as the processes of one worker see them.

TransferError
├── ServiceGone        the transfer service has ended; all its handoffs are lost
├── TransferRefused    the service refused a call; the handoff does not happen
├── NoRoom             an arena has no extent of that size now
├── StreamLost         service/handoff_stream.py: the stream of a handoff has ended
└── MalformedFrame     the bytes are not a frame, or not the frame that they claim to be
"""

from __future__ import annotations

from baton.v1 import kv_transfer_pb2

# Longest explanation that holds text of another worker. Explanations are logged, kept with ended
# handoffs, and sent to local clients, whose messages have a limit.
MAX_TEXT_CHARS = 4096


def shortened(text: str) -> str:
    """Returns a text with text of another worker in it, cut to MAX_TEXT_CHARS."""
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[: MAX_TEXT_CHARS - 3]}..."


class TransferError(Exception):
    """Base class of the errors that the handoff raises."""


class ServiceGone(TransferError):
    """The transfer service has ended, or never started. The message says why."""


class TransferRefused(TransferError):
    """The service refused a call. The message says why.

    Attributes:
        reason: Reason of a handoff that was not opened; UNSPECIFIED for wrong arguments.
    """

    def __init__(
        self,
        message: str,
        reason: kv_transfer_pb2.RefusalReason.ValueType = (
            kv_transfer_pb2.REFUSAL_REASON_UNSPECIFIED
        ),
    ) -> None:
        super().__init__(message)
        self.reason = reason


class NoRoom(TransferError):
    """An arena has no free extent of that size now."""


class MalformedFrame(TransferError):
    """Bytes from the network are not a valid frame.

    Attributes:
        reason: Why the sender is refused: usually REFUSAL_REASON_MALFORMED, or
            REFUSAL_REASON_CHECKSUM when the bytes were altered.

    The message may hold text of the sender; it is shortened.
    """

    def __init__(
        self,
        message: str,
        reason: kv_transfer_pb2.RefusalReason.ValueType = kv_transfer_pb2.REFUSAL_REASON_MALFORMED,
    ) -> None:
        super().__init__(shortened(message))
        self.reason = reason
