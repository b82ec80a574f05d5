"""How many requests wait in the lanes, for what, and for how long."""

from __future__ import annotations

from collections.abc import Mapping

from baton.coordinator.lanes.fleet_queues import FleetQueues
from baton.coordinator.lanes.running_limit import RunningLimit
from baton.coordinator.lanes.tenants import QueueEntry, Tenants
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import Lane
from baton.coordinator.state.requests import Submission
from baton.runtime.config import LanesConfig
from baton.runtime.counted import counted
from baton.runtime.enum_names import lane_name
from baton.runtime.fair_places import FairPlaces
from baton.v1 import common_pb2


class LaneWaits:
    """Answers questions about waiting requests from the state of the lanes, and changes nothing.

    A waiting request is held if it waits for the concurrency limit of its tenant (max_concurrent)
    or of its lane (max_running). More workers would not run held requests. Interrupted requests
    (InterruptedQueue) are held only by twice the limit of their tenant.

    Args:
        config: Limits and shares of the lanes.
        tenants: The tenants that have requests. Lanes owns these and the following tables.
        fleets: The queues of each fleet.
        limits: The concurrency limit of each lane.
        places: The places of waiting requests, by the lane that they were submitted to.
    """

    def __init__(
        self,
        config: LanesConfig,
        tenants: Tenants,
        fleets: Mapping[Fleet, FleetQueues],
        limits: Mapping[Lane, RunningLimit],
        places: Mapping[Lane, FairPlaces],
    ) -> None:
        self._batch_share = config.batch.share
        self._long_prompt_tokens = config.long_prompt_tokens
        self._tenants, self._fleets = tenants, fleets
        self._limits, self._places = limits, places

    # ---- Held requests

    def is_held(self, entry: QueueEntry) -> bool:
        """Whether a waiting request, the last of its tenant, is held."""
        tenant = entry.queue.tenant
        if entry.is_interrupted:
            return not tenant.may_continue
        if self._limits[entry.queue.lane_queue.lane].is_reached:
            return True
        return tenant.slots is not None and tenant.num_waiting > tenant.slots.num_free

    def reached_limit(self, entry: QueueEntry) -> str:
        """Returns which limit keeps a waiting request from running, in words; empty: none does."""
        tenant, lane = entry.queue.tenant, entry.queue.lane_queue.lane
        if entry.is_interrupted and tenant.may_continue:
            return ""
        if not tenant.can_run:
            return (
                f"tenant {tenant.name!r} runs {counted(tenant.num_running, 'request')}, at most "
                f"{tenant.config.max_concurrent} (max_concurrent)"
            )
        limit = self._limits[lane]
        if limit.is_reached:
            return (
                f"the {lane_name(lane)} lane runs {counted(limit.num_running, 'request')}, at most "
                f"{limit.max_running} (lanes.{lane_name(lane)}.max_running)"
            )
        return ""

    def num_runnable(self, lane: Lane) -> int:
        """Returns how many of the requests that were submitted to a lane wait and are not held."""
        places, num_held, num_first = self._places[lane], 0, 0
        for tenant in self._tenants:
            # Interrupted requests are interactive.
            num_interrupted = tenant.num_interrupted if lane == common_pb2.LANE_INTERACTIVE else 0
            num_first += num_interrupted
            if tenant.slots is not None:
                num_waiting = places.num_of(tenant.name)
                num_held += min(
                    num_waiting - num_interrupted, max(0, num_waiting - tenant.slots.num_free)
                )
        return int(max(num_first, min(len(places) - num_held, self._limits[lane].num_free)))

    def work_s(self, lane: Lane, fleet: Fleet) -> float:
        """Returns the seconds of prefill work that wait for a fleet's workers and are not held.

        Args:
            lane: The lane that the requests were submitted to.
            fleet: The fleet.
        """
        queues = self._fleets.get(fleet)
        if queues is None:
            return 0.0
        if self._limits[lane].is_reached:
            is_interactive = lane == common_pb2.LANE_INTERACTIVE
            return queues.interrupted.work_us / 1e6 if is_interactive else 0.0
        held_us = 0.0
        for tenant in self._tenants:
            if tenant.slots is not None:
                for lane_queue in queues.ordered_in(lane):
                    queue = tenant.queues.get(lane_queue)
                    if queue is not None and (num := len(queue)):
                        held_us += queue.work_us * max(0.0, 1 - tenant.slots.num_free / num)
        # A long prompt may be ordered in another lane than it was submitted to.
        return max(0.0, queues.submitted_work_us[lane] - held_us) / 1e6

    # ---- Predictions

    def turn_s(
        self,
        submission: Submission,
        fleet: Fleet,
        growth_s: float,
        now: float,
        work_s: float,
        num_workers: float,
    ) -> float:
        """Predicts how long a request that arrives now would wait for its turn, in seconds.

        Args:
            submission: The request, which is not queued.
            fleet: The fleet that it would wait for.
            growth_s: As Request.growth_s.
            now: Current time by the core's clock.
            work_s: Its own prefill work, in seconds.
            num_workers: Number of workers that compute prompts; a worker at half speed counts half.
        """
        queues = self._fleets.get(fleet)
        if queues is None:
            return 0.0
        queue = queues.of(submission.ordered_in(self._long_prompt_tokens))
        # Seconds of prefill work that can leave the queue in a second.
        most_per_s = num_workers * (1 - self._batch_share)
        first_s = queues.interrupted.work_us / 1e6 / most_per_s
        if queue is queues.batch:
            first_s += queues.interactive.work.work_s / most_per_s
            most_per_s = num_workers
        weight = self._tenants.config(submission.tenant).weight
        tenant = self._tenants.find(submission.tenant)
        ahead_s = queue.ahead_s(tenant, weight, work_s, now + growth_s)
        wait_s = first_s + ahead_s / most_per_s
        if queue.work.work_s:
            # If KV blocks or concurrency are short, less leaves than prefill workers could compute.
            per_s = queue.work.per_s(most_per_s, now)
            wait_s = max(wait_s, (ahead_s + work_s) / per_s - work_s / most_per_s)
        return wait_s

    def slot_s(self, submission: Submission, now: float) -> float | None:
        """Predicts how long a request would wait for its tenant's concurrency limit, in seconds.

        Args:
            submission: The request, which is not queued.
            now: Current time by the core's clock.

        Returns:
            None if the tenant may run one more request now.
        """
        tenant = self._tenants.find(submission.tenant)
        if tenant is None or tenant.slots is None:
            return None
        before = {submission.ordered_in(self._long_prompt_tokens), common_pb2.LANE_INTERACTIVE}
        num_waiting = tenant.num_interrupted + sum(
            len(one) for one in tenant.queues.values() if one.lane_queue.lane in before
        )
        return tenant.slots.wait_s(num_waiting, now)
