"""The recovery timeout: how long a request whose worker died waits for another worker."""

from __future__ import annotations

import math

from baton.coordinator.core.parts import Parts
from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state.pools import POOL_OF
from baton.coordinator.state.requests import Request, RequestState
from baton.v1 import common_pb2


class RecoveryTimeout:
    """Decides how long a request whose worker died may wait for a replacement.

    The limit is max_recovery_s. A request waits longer for a worker that is starting, and a batch
    request also waits while interactive requests use its room.
    """

    def __init__(self, parts: Parts, scaler: Scaler) -> None:
        self._clock, self._scaler = parts.clock, scaler
        self._max_recovery_s = parts.config.max_recovery_s

    def waits_until(self, request: Request) -> float:
        """Returns until when a recovering request may wait.

        A batch request waits as long as its fleet has serving workers for prompts and for outputs.
        Any request waits while its fleet has no worker for one of them and such a worker is on its
        way, and for max_recovery_s after that worker has attached. The whole wait is limited to
        max_recovery_s plus the time of a start: the start timeout for a batch request, the usual
        cold start time for an interactive one.

        Args:
            request: A request that has not ended.

        Returns:
            Time by the core's clock; in the past if there is nothing to wait for.
        """
        now = self._clock.now
        if request.state is not RequestState.RECOVERING:
            return request.waits_until
        since, members = request.state_since, request.fleet.workers
        is_batch = request.submission.lane == common_pb2.LANE_BATCH
        if is_batch and all(members.able(role).num_serving for role in POOL_OF):
            return now + self._max_recovery_s
        if not self._scaler.active:
            return request.waits_until
        until = since
        for role in POOL_OF:
            there = members.able(role)
            if there.since < math.inf:
                until = max(until, there.since)
            elif there.num_coming or any(
                self._scaler.launches.num_starting(POOL_OF[one], request.fleet)
                for one in members.roles_doing(role)
            ):
                until = now
            else:
                return request.waits_until
        if until == since:
            return request.waits_until
        start_s = self._scaler.start_timeout_s if is_batch else self._scaler.cold_start_s
        return min(until, since + start_s) + self._max_recovery_s
