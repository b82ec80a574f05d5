"""The Admin service's calls on rollouts: start, share, status, promote, abort."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from baton.coordinator.rollouts.canary_sizes import num_without_gpus, serving
from baton.coordinator.rollouts.comparison import Verdict, judge
from baton.coordinator.rollouts.rollout import Rollout, Rollouts
from baton.coordinator.server.shell import Shell
from baton.coordinator.server.status import percentiles
from baton.coordinator.state import events as ev
from baton.coordinator.state.fleets import Fleet
from baton.coordinator.state.lanes import LANES
from baton.coordinator.state.pools import ROLE_OF, Pool
from baton.coordinator.state.revision import Revision
from baton.coordinator.telemetry.fleet_stats import FleetStats
from baton.coordinator.telemetry.times import drain_s
from baton.runtime.config import BatonConfig
from baton.runtime.config_error import ConfigError
from baton.runtime.durations import duration
from baton.runtime.errors import Aborted, InvalidArgument
from baton.v1 import admin_pb2, cluster_pb2

_VERDICTS = {
    Verdict.TOO_FEW: admin_pb2.ROLLOUT_VERDICT_TOO_FEW_SAMPLES,
    Verdict.NO_WORSE: admin_pb2.ROLLOUT_VERDICT_NO_WORSE,
    Verdict.WORSE: admin_pb2.ROLLOUT_VERDICT_WORSE,
}


class RolloutCalls:
    """Implements the calls; wrong input raises a BatonError."""

    def __init__(self, shell: Shell, config: BatonConfig) -> None:
        self._shell, self._config = shell, config

    @property
    def _rollouts(self) -> Rollouts:
        return self._shell.core.rollouts

    def start(self, request: admin_pb2.StartRolloutRequest) -> admin_pb2.StartRolloutResponse:
        stable = self._rollouts.traffic.stable.revision
        revision = Revision(
            request.revision,
            request.model or stable.model,
            {**stable.engine_args, **_engine_args(request.engine_args)},
        )
        sizes = {
            pool: getattr(request, pool.value) for pool in Pool if request.HasField(pool.value)
        }
        refused = self._rollouts.start_error(revision, request.share, sizes)
        if refused is not None:
            raise refused
        try:
            revision.over(self._config)
        except ConfigError as error:
            allowed = f"must fit the configuration: {error}"
            raise InvalidArgument("engine_args", dict(request.engine_args), allowed) from None
        self._shell.post(
            ev.RolloutRequested(revision, request.share, sizes, request.abort_if_worse)
        )
        return admin_pb2.StartRolloutResponse(message=self._started(revision.name, request.share))

    def set_share(
        self, request: admin_pb2.SetRolloutShareRequest
    ) -> admin_pb2.SetRolloutShareResponse:
        if (refused := self._rollouts.share_error(request.share)) is not None:
            raise refused
        self._shell.post(ev.ShareRequested(request.share))
        canary = self._rollouts.traffic.canary
        name = canary.name if canary is not None else ""
        message = f"{100 * request.share:.3g} % of new sessions go to revision {name}"
        return admin_pb2.SetRolloutShareResponse(message=message)

    def promote(self, request: admin_pb2.PromoteRolloutRequest) -> admin_pb2.PromoteRolloutResponse:
        within_s = _drain_s(request)
        if (refused := self._rollouts.promote_error()) is not None:
            raise refused
        rollout = self._rollouts.rollout
        assert rollout is not None
        self._shell.post(ev.PromotionRequested(within_s))
        name, old = rollout.canary.name, rollout.stable.name
        if self._rollouts.rollout is None:
            if self._rollouts.traffic.stable is not rollout.canary:
                # The canary was found to be worse only now, and its rollout has abort_if_worse.
                raise Aborted(self._rollouts.outcome)
            message = (
                f"revision {name} is the stable one; the workers of {old} finish their requests "
                "and leave"
            )
        else:
            message = (
                f"revision {name} becomes the stable one when {self._awaited(rollout)}; then the "
                f"workers of {old} finish their requests and leave"
            )
        if rollout.stats:
            judged = judge(rollout.stats[rollout.stable], rollout.stats[rollout.canary])
            if judged.verdict is not Verdict.NO_WORSE:
                message += f"; {judged.reason}"
        if lost := _adapters(rollout.stable) - _adapters(rollout.canary):
            message += (
                f"; revision {name} has no adapter {', '.join(sorted(lost))}: revision {old} "
                "finishes the admitted requests for it, and new ones are refused"
            )
        wanted = _in_configuration(rollout.canary.revision)
        message += f". To keep it after a restart, {wanted} in the configuration"
        return admin_pb2.PromoteRolloutResponse(message=message)

    def abort(self, request: admin_pb2.AbortRolloutRequest) -> admin_pb2.AbortRolloutResponse:
        within_s = _drain_s(request)
        if (refused := self._rollouts.abort_error()) is not None:
            raise refused
        rollout = self._rollouts.rollout
        assert rollout is not None
        name, stable = rollout.canary.name, rollout.stable.name
        running = rollout.canary.num_requests
        self._shell.post(ev.AbortRequested("requested by an operator", within_s))
        message = (
            f"all new requests go to revision {stable}; the workers of {name} finish their "
            f"requests ({running}) and leave"
        )
        return admin_pb2.AbortRolloutResponse(message=message)

    def status(self) -> admin_pb2.RolloutStatus:
        rollouts, now = self._rollouts, self._shell.now()
        traffic = rollouts.traffic
        shown = rollouts.rollout or rollouts.last
        found = admin_pb2.RolloutStatus(
            share=traffic.share, last=rollouts.outcome, stable_revision=traffic.stable.name
        )
        stats: Mapping[Fleet, FleetStats] = shown.stats if shown is not None else {}
        stable = shown.stable if shown is not None else traffic.stable
        shown_names = {stable.name}
        found.stable.CopyFrom(self._status_of(stable, stats.get(stable)))
        if shown is not None:
            canary = shown.canary
            shown_names.add(canary.name)
            found.canary.CopyFrom(self._status_of(canary, stats.get(canary)))
            found.canary.model = canary.revision.model
            for key, value in canary.revision.engine_args.items():
                found.canary.engine_args[key] = json.dumps(value)
        if shown is not None and stats:
            judged = judge(stats[stable], stats[shown.canary])
            found.verdict, found.verdict_reason = _VERDICTS[judged.verdict], judged.reason
        if rollouts.rollout is not None:
            found.phase = _phase(rollouts.rollout, is_open=traffic.open)
            found.problem = self._problem(rollouts.rollout)
            found.abort_if_worse = rollouts.rollout.abort_if_worse
            if stats:
                found.compared_for.CopyFrom(duration(now - rollouts.rollout.since))
        others = [
            fleet
            for fleet in self._shell.core.fleets
            if fleet.name not in shown_names and (len(fleet.workers) or fleet in rollouts.retiring)
        ]
        others.sort(key=lambda fleet: fleet.name)
        found.others.extend(self._status_of(fleet, None) for fleet in others)
        return found

    # ---- Private methods

    def _started(self, name: str, share: float) -> str:
        rollout, traffic = self._rollouts.rollout, self._rollouts.traffic
        gets = f"revision {name} gets {100 * share:.3g} % of new sessions"
        if traffic.open:
            return f"{gets} from now on"
        sizes = rollout.sizes if rollout is not None else {}
        starting = " and ".join(
            f"{number} {pool.value}" for pool, number in sizes.items() if number
        )
        workers = f"; {starting} workers are being started" if starting else ""
        is_elastic = self._shell.core.fleets.elastic
        condition = "one of its workers serves" if is_elastic else "it serves in both pools"
        return f"{gets} once {condition}{workers}"

    def _awaited(self, rollout: Rollout) -> str:
        """Returns what a promotion that has not happened yet waits for, as a clause."""
        counts = serving(rollout.canary.workers)
        lacking = ", ".join(
            f"{pool.value} {number}"
            for pool in Pool
            if (number := rollout.sizes[pool] - counts[pool]) > 0
        )
        if lacking:
            return f"all its workers serve (missing: {lacking})"
        return (
            f"the starting worker of revision {rollout.stable.name} serves, which running outputs "
            "need"
        )

    def _problem(self, rollout: Rollout) -> str:
        scaler, canary = self._shell.core.scaler, rollout.canary
        found = []
        for pool, number in num_without_gpus(scaler, canary, rollout.sizes).items():
            found += [scaler.launches.problem(pool, canary), scaler.launches.waiting(pool, canary)]
            if number:
                found.append(f"no free GPUs (scaling.max_gpus) for {number} {pool.value} workers")
        return "; ".join(filter(None, found))

    def _status_of(self, fleet: Fleet, stats: FleetStats | None) -> admin_pb2.RevisionStatus:
        # The fleet of a rollout that has ended may have been forgotten, and created again.
        fleet = self._shell.core.fleets.find(fleet.name) or fleet
        found = admin_pb2.RevisionStatus(
            name=fleet.name,
            pools=[self._pool(fleet, pool) for pool in Pool],
            num_running=fleet.num_requests,
        )
        if stats is None:
            return found
        found.num_admitted, found.num_ended = stats.num_admitted, stats.num_ended
        found.num_recoveries, found.num_moved = stats.num_recoveries, stats.num_moved
        found.errors.update(stats.errors)
        for lane in LANES:
            latency = stats.lanes[lane]
            found.lanes.add(lane=lane, ttft=percentiles(latency.ttft), itl=percentiles(latency.itl))
        return found

    def _pool(self, fleet: Fleet, pool: Pool) -> admin_pb2.RevisionPool:
        core, role = self._shell.core, ROLE_OF[pool]
        workers = [one for one in fleet.workers if one.role == role]
        rollout = core.rollouts.rollout
        desired = 0
        if rollout is not None and rollout.canary is fleet:
            desired = rollout.sizes[pool]
        elif fleet is core.fleets.stable:
            desired = core.scaler.desired(pool)
        return admin_pb2.RevisionPool(
            role=role,
            num_serving=sum(one.serving for one in workers),
            num_starting=core.scaler.launches.num_starting(pool, fleet),
            num_draining=sum(one.state == cluster_pb2.WORKER_STATE_DRAINING for one in workers),
            desired=desired,
        )


def _adapters(fleet: Fleet) -> set[str]:
    model = fleet.workers.model
    return {one.name for one in model.adapters} if model is not None else set()


def _phase(rollout: Rollout, *, is_open: bool) -> admin_pb2.RolloutPhase.ValueType:
    if rollout.drain_s is not None:
        return admin_pb2.ROLLOUT_PHASE_PROMOTING
    return admin_pb2.ROLLOUT_PHASE_RUNNING if is_open else admin_pb2.ROLLOUT_PHASE_WAITING


def _engine_args(sent: Mapping[str, str]) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, text in sent.items():
        try:
            found[name] = json.loads(text)
        except ValueError:
            raise InvalidArgument(f'engine_args["{name}"]', text, "must be JSON") from None
    return found


def _drain_s(
    request: admin_pb2.PromoteRolloutRequest | admin_pb2.AbortRolloutRequest,
) -> float | None:
    if not request.HasField("drain_timeout"):
        return None
    return drain_s("drain_timeout", request.drain_timeout)


def _in_configuration(revision: Revision) -> str:
    """Returns the configuration keys to change so that a later start serves this revision."""
    lines = [f"worker.revision: {revision.name}"]
    if revision.model:
        lines.append(f"model: {revision.model}")
    if revision.engine_args:
        lines.append(f"engine_args: {json.dumps(dict(revision.engine_args))}")
    return "set " + ", ".join(lines)
