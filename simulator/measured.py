"""Compares ways to serve the load that a live cell has just served (`baton doctor --compare`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import Targets, in_seconds
from baton.load.traces import Arrival, longest
from baton.runtime.config import BatonConfig, SimulatedConfig, StepsConfig, parse
from baton.runtime.durations import to_seconds
from baton.runtime.steps.step_budget import StepTargets
from baton.simulator import comparison
from baton.simulator.comparison import Row, Setup
from baton.v1 import admin_pb2, cluster_pb2, common_pb2

_ROLES = {Pool.PREFILL: common_pb2.ROLE_PREFILL, Pool.DECODE: common_pb2.ROLE_DECODE}
# Fewer requests, or steps behind the latency model, say little about a load.
LEAST_REQUESTS, LEAST_STEPS = 50, 100


class NotMeasured(ValueError):
    """The cell has not measured enough for a comparison; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A live cell as the simulator sees it.

    Attributes:
        config: The cell's number of workers, their measured step costs, and its targets. Its
            section `simulated` describes a worker that decodes.
        arrivals: The latest requests that ended, in order of arrival.
        engines: The workers of each pool that has some.
    """

    config: BatonConfig
    arrivals: Sequence[Arrival]
    engines: Mapping[Pool, SimulatedConfig]

    @property
    def targets(self) -> Targets:
        """The targets of the interactive lane."""
        return in_seconds(self.config.scaling.targets.interactive)

    def setups(self) -> list[Setup]:
        """Returns colocated serving, the present split, and the same workers without a split."""
        prefill, decode = self.config.prefill.workers, self.config.decode.workers
        found = comparison.colocated(self.config, self.engines.values())
        if prefill and decode:
            found.append(Setup(f"{prefill} prefill + {decode} decode", "static", prefill, decode))
        return [*found, Setup("elastic", "static", prefill, decode, elastic=True)]

    def is_present(self, setup: Setup) -> bool:
        """Whether the cell is set up like this now."""
        return setup.policy == "static" and setup.elastic == self.config.is_elastic

    def best(self, rows: Sequence[Row]) -> Row:
        """Returns the row that attains most; of equal ones the present, then an elastic cell."""

        def rank(row: Row) -> tuple[float, bool, bool]:
            attained = round(row.figures.attained, 3)
            return attained, self.is_present(row.setup), row.setup.elastic

        return max(rows, key=rank)

    def conclusion(self, rows: Sequence[Row]) -> str:
        """Says which way would have served the load best, and by how much."""
        best = self.best(rows)
        present = next((row for row in rows if self.is_present(row.setup)), None)
        text = f"Best for this load: {best.setup.name}, with {_percent(best)} attained"
        if present is None:
            return f"{text}."
        if present is best:
            return f"{text}. The cell is set up like this."
        points = 100 * (best.figures.attained - present.figures.attained)
        return (
            f"{text}, {points:.1f} points more than the present cell "
            f"({present.setup.name}, {_percent(present)})."
        )


def measured(
    status: admin_pb2.GetStatusResponse,
    workers: Sequence[admin_pb2.WorkerInfo],
    requests: Sequence[admin_pb2.RequestInfo],
) -> MeasuredCell:
    """Describes a live cell for the simulator.

    Args:
        status: The cell's status.
        workers: All its workers.
        requests: Its requests, those that ended recently included.

    Raises:
        NotMeasured: There are too few requests, too few measured steps, or no serving worker; the
            workers differ in their measured speed, or those of a pool in their settings; or a
            request is longer than the workers allow now.
    """
    serving = [one for one in workers if one.state == cluster_pb2.WORKER_STATE_SERVING]
    if len(serving) < 2:
        raise NotMeasured(f"workers that serve: {len(serving)}; a comparison needs at least 2")
    worker = serving[0]
    kinds = {one.latency.SerializeToString() for one in serving}
    if len(kinds) > 1:
        raise NotMeasured("the workers have different step costs; a comparison needs equal ones")
    if worker.latency.num_samples < LEAST_STEPS:
        raise NotMeasured(
            f"{worker.latency.num_samples} steps are measured; a comparison needs {LEAST_STEPS}"
        )
    arrivals = _arrivals(requests)
    if len(arrivals) < LEAST_REQUESTS:
        raise NotMeasured(
            f"{len(arrivals)} requests have ended; a comparison needs {LEAST_REQUESTS}"
        )
    engines = {
        pool: _engine(pool, members)
        for pool, role in _ROLES.items()
        if (members := [one for one in serving if one.role == role])
    }
    _refuse_different("", "block_size_tokens", [one.block_size_tokens for one in engines.values()])
    limit, tokens = min(one.max_model_len for one in engines.values()), longest(arrivals)
    if tokens > limit:
        raise NotMeasured(
            f"a request had {tokens} tokens, prompt and output, but the workers' max_model_len is "
            f"{limit} now; compare again when that request is no longer among the latest ones"
        )
    lane = next(one for one in status.lanes if one.info.lane == common_pb2.LANE_INTERACTIVE)
    roles = [one.role for one in serving]
    main = engines.get(Pool.DECODE) or engines[Pool.PREFILL]
    values = {
        "elastic": status.elastic,
        "prefill": {"workers": roles.count(common_pb2.ROLE_PREFILL)},
        "decode": {"workers": roles.count(common_pb2.ROLE_DECODE)},
        "simulated": main.model_dump(),
        "steps": _steps(lane.targets, elastic=status.elastic),
        "scaling": {
            "targets": {
                "interactive": {
                    "ttft_ms": lane.targets.ttft_ms or None,
                    "ttft_ms_per_1k_tokens": lane.targets.ttft_ms_per_1k_tokens,
                    "itl_ms": lane.targets.itl_ms or None,
                    "percentile": lane.targets.percentile,
                }
            }
        },
    }
    return MeasuredCell(parse(values, "the cell"), arrivals, engines)


def _engine(pool: Pool, workers: Sequence[admin_pb2.WorkerInfo]) -> SimulatedConfig:
    """Describes a worker of a pool; of different KV caches the smallest counts.

    Raises:
        NotMeasured: The workers differ in another setting.
    """
    settings: list[dict[str, Any]] = [
        {
            "block_size_tokens": one.capacity.block_size_tokens,
            "max_num_seqs": one.capacity.max_num_seqs,
            "max_num_batched_tokens": one.capacity.max_num_batched_tokens,
            "max_model_len": one.model.max_model_len,
        }
        for one in workers
    ]
    for name in settings[0]:
        _refuse_different(f"{pool.value} ", name, [one[name] for one in settings])
    values = {
        **step_costs(workers[0].latency),
        **settings[0],
        "kv_tokens": min(one.capacity.kv_tokens for one in workers),
    }
    return parse({"simulated": values}, "the cell").simulated


def _steps(targets: admin_pb2.LaneTargets, *, elastic: bool) -> dict[str, Any]:
    """Returns the settings of `steps` that the targets of the interactive lane show."""
    if not targets.itl_ms:
        return {}
    if not targets.longest_gap_ms:
        return {"scheduler": "vllm"}
    # A gap that the coordinator may have chosen itself is chosen again in each simulation.
    chosen = {
        round(StepTargets.of(StepsConfig(), targets.itl_ms / 1e3, long_gaps=long).longest_gap_s, 6)
        for long in {False, elastic}
    }
    if round(targets.longest_gap_ms / 1e3, 6) in chosen:
        return {}
    return {"longest_gap_ms": targets.longest_gap_ms}


def _refuse_different(which: str, name: str, values: Sequence[int]) -> None:
    if len(found := sorted(set(values))) > 1:
        raise NotMeasured(
            f"the {which}workers have different {name} ({', '.join(map(str, found))}); a "
            "comparison needs equal ones"
        )


def step_costs(latency: admin_pb2.LatencyInfo) -> dict[str, float]:
    """Returns the measured step costs as keys of the configuration's section `simulated`."""
    return {
        "prefill_base_ms": latency.prefill_base_ms,
        "prefill_per_token_ms": latency.prefill_per_token_ms,
        "prefill_per_token_squared_ms": latency.prefill_per_token_squared_ms,
        "step_base_ms": latency.step_base_ms,
        "step_per_request_ms": latency.step_per_request_ms,
        "step_per_kv_token_ms": latency.step_per_kv_token_ms,
        "mixed_base_ms": latency.mixed_base_ms,
    }


def _arrivals(requests: Sequence[admin_pb2.RequestInfo]) -> list[Arrival]:
    ended = [
        one
        for one in requests
        if one.state == admin_pb2.REQUEST_STATE_FINISHED and one.completion_tokens
    ]
    times = [to_seconds(one.arrived_at) for one in ended]
    begin = min(times, default=0.0)
    found = [
        Arrival(at - begin, one.prompt_tokens, one.completion_tokens)
        for at, one in zip(times, ended, strict=True)
    ]
    return sorted(found, key=lambda one: one.at_s)


def _percent(row: Row) -> str:
    return f"{100 * row.figures.attained:.1f} %"
