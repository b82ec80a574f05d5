"""Clients of simulated cells do not know how long their outputs will be."""

from __future__ import annotations

import math

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import ScalingConfig
from baton.load.traces import Arrival
from baton.runtime.config import parse
from baton.runtime.steps.latency import LatencyModel
from baton.simulator.cell import SimulatedCell
from baton.simulator.parts import Shape
from baton.simulator.policies import Static

SHAPE = Shape(
    LatencyModel(0.005, 1e-4, 0.0, 0.010, 1e-4, 0.0), max_model_len=2048, follows_step_targets=True
)
ARRIVALS = [
    Arrival(0.0, 100, 1),
    Arrival(0.1, 100, 30),
    Arrival(0.2, 100, 1000),
    Arrival(0.3, 1500, 400),
    Arrival(0.4, 100, 513),
]


class WatchedCell(SimulatedCell):
    """Collects the limits of the outputs that the coordinator learns."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.limits: list[int] = []

    def _post(self, event: ev.Event) -> None:
        if isinstance(event, ev.Submitted):
            self.limits.append(event.submission.sampling.max_tokens)
        super()._post(event)


def served(*, elastic: bool, loses_at_s: float | None = None) -> WatchedCell:
    core = CoreConfig.of(parse({"model": "simulated", "elastic": elastic}, "test"))
    cell = WatchedCell(core, dict.fromkeys(Pool, SHAPE), Static(ScalingConfig()))
    if loses_at_s is not None:
        cell.at(cell.now + loses_at_s, cell._post, ev.WorkerLost("decode-1", "was lost"))
    record = cell.run(ARRIVALS, dict.fromkeys(Pool, 2), 1.0)
    cell.core.check_integrity()
    assert not record.reasons
    assert not any(map(math.isnan, record.ends))
    return cell


def test_the_coordinator_learns_one_limit_for_all_outputs():
    """The room behind a long prompt is the limit if it is smaller."""
    assert served(elastic=True).limits == [1024, 1024, 1024, 2048 - 1500, 1024]


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("loses_at_s", [None, 2.0])
def test_outputs_end_at_their_lengths_in_the_trace(elastic, loses_at_s):
    cell = served(elastic=elastic, loses_at_s=loses_at_s)
    assert bool(cell.core.stats.num_recoveries) == (loses_at_s is not None)
    ended = sorted(cell.core.recently_ended(), key=lambda one: one.arrived_at)
    lengths = [one.num_output_tokens for one in ARRIVALS]
    assert [one.num_output_tokens for one in ended] == lengths
