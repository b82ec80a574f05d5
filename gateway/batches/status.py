"""The states of a batch, named as in OpenAI's API."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """State of a batch.

    `finalizing` is never seen: the result files appear in the transaction that ends the batch.
    """

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_open(self) -> bool:
        """Whether the batch will change its state."""
        return bool(TRANSITIONS[self])


_NONE: frozenset[Status] = frozenset()
TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.VALIDATING: frozenset(
        {Status.IN_PROGRESS, Status.FAILED, Status.CANCELLING, Status.EXPIRED}
    ),
    Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.CANCELLING, Status.EXPIRED}),
    Status.FINALIZING: frozenset({Status.COMPLETED}),
    Status.CANCELLING: frozenset({Status.CANCELLED}),
    Status.FAILED: _NONE,
    Status.COMPLETED: _NONE,
    Status.EXPIRED: _NONE,
    Status.CANCELLED: _NONE,
}


def advance(old: Status, new: Status) -> Status:
    """Returns the new state. Raises ValueError if the table has no such move."""
    if new not in TRANSITIONS[old]:
        raise ValueError(f"a batch that is {old} cannot become {new}")
    return new
