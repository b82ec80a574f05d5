"""Waits for a canary do not correct the predicted waits for the stable fleet."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.revision import Revision
from baton.runtime.config import parse
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import common_pb2
from tests.coordinator.virtual_cell import VirtualCell, WorkerShape

INTERACTIVE = common_pb2.LANE_INTERACTIVE
# A prompt token takes 0.1 ms.
SHAPE = WorkerShape(
    LatencyModel(0.005, 0.0001, 0.0, 0.010, 0.0001, 1e-7), max_num_batched_tokens=256
)


@pytest.mark.parametrize("dies", [False, True])
def test_an_incident_of_the_canary_does_not_raise_the_wait_correction(dies):
    """The canary's workers are silent for a second; if they die then, their requests move."""
    values = {
        "model": "simulated",
        "elastic": False,
        "decode": {"local_prefill": False},
        "lanes": {"interactive": {"ttft_ms": 600}},
    }
    cell = VirtualCell(CoreConfig.of(parse(values, "test")))
    for prefix, revision in (("", ""), ("c", "r2")):
        cell.add_worker(f"{prefix}p", common_pb2.ROLE_PREFILL, SHAPE, revision=revision)
        cell.add_worker(f"{prefix}d", common_pb2.ROLE_DECODE, SHAPE, revision=revision)
    cell.post(ev.RolloutRequested(Revision("r2"), 1.0, {}))
    cell.run(cell.now + 1)
    begin, tell = cell.now, cell.tell

    def tell_late(worker, event):
        if worker.key[0].startswith("c"):
            cell.at(max(cell.now, begin + 9), lambda: tell(worker, event))
        else:
            tell(worker, event)

    # One prefill worker computes twice as many prompts per second.
    cell.poisson(4.0, begin, begin + 12, lambda: cell.submit(cell.random.randint(200, 1800), 2))
    cell.run(begin + 8)
    cell.tell = tell_late
    cell.run(begin + 8.9)
    for name in ("cp", "cd") if dies else ():
        cell.kill(name)
    cell.run(begin + 20)
    assert not any(one.error is not None and not one.shed for one in cell.outcomes)
    assert cell.core.wait_correction(INTERACTIVE) == 1.0
