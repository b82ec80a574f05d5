"""How long a request that lost its worker waits for another one."""

from __future__ import annotations

import math

from baton.coordinator.scaling.scaling import Scaler
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import ROLE_OF
from baton.coordinator.state.requests import Request, RequestState
from baton.v1 import common_pb2


class RecoveryTimeout:
    """Lets requests that lost their worker wait for longer than max_recovery_s where that helps.

    They wait for a start for as long as a start may take: otherwise it would come for nobody. Batch
    requests also wait while interactive ones have their place, as those do that were parked.
    """

    def __init__(self, config: CoreConfig, scaler: Scaler) -> None:
        self._max_recovery_s, self._scaler = config.max_recovery_s, scaler

    def waits_until(self, request: Request, now: float) -> float:
        """When a recovering request is to be looked at again, or has waited for long enough.

        A batch request waits for as long as workers of its fleet serve in both pools.

        While its fleet has no worker in a pool, and one is on its way there, any request waits;
        from then on for max_recovery_s, as if it had lost its worker just now. In all it waits no
        longer than max_recovery_s and what a start takes: a job the longest that any may, a person
        what one takes as a rule.

        Args:
            request: not ended.
            now: by the core's clock.

        Returns:
            By the core's clock; in the past where there is nothing to wait for.
        """
        if request.state is not RequestState.RECOVERING:
            return request.waits_until
        since, members = request.state_since, request.fleet.workers
        is_batch = request.submission.lane == common_pb2.LANE_BATCH
        if is_batch and all(members.presence(role).num_serving for role in ROLE_OF.values()):
            return now + self._max_recovery_s
        if not self._scaler.active:
            return request.waits_until
        until = since
        for pool, role in ROLE_OF.items():
            there = members.presence(role)
            if there.since < math.inf:
                until = max(until, there.since)
            elif there.num_coming or self._scaler.launches.num_starting(pool, request.fleet):
                until = now
            else:
                return request.waits_until
        if until == since:
            return request.waits_until
        start_s = self._scaler.start_timeout_s if is_batch else self._scaler.cold_start_s
        return min(until, since + start_s) + self._max_recovery_s
