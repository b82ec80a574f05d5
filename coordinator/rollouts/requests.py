"""What a rollout reads of requests, and does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.coordinator.lanes.lanes import Lanes
from baton.coordinator.state.request_table import RequestTable
from baton.coordinator.state.requests import Request
from baton.coordinator.telemetry.stats import CoreStats
from baton.runtime.errors import BatonError


class RolloutRequests(Protocol):
    """The part of the request lifecycle that rollouts use.

    core/request_lifecycle.py implements it. Its own layer is above this one, so rollouts know only
    this interface.

    Attributes:
        room_freed: to be called when a waiting request may find a worker now.
    """

    requests: RequestTable
    lanes: Lanes
    stats: CoreStats
    room_freed: Callable[[], None]

    def fail(self, request: Request, error: BatonError, now: float) -> None:
        """Ends a request with an error."""

    def move(self, request: Request, now: float) -> None:
        """Takes a dispatched request off its workers; it waits for its next turn."""

    def change_revision(self, request: Request, revision: str) -> None:
        """Moves a waiting request without any output to another revision."""
