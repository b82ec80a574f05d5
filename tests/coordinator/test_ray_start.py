"""What Ray is asked for: by the worker's own size, whatever is configured."""

from __future__ import annotations

import pytest

from baton.coordinator.ray_launch.launcher import start_of
from baton.coordinator.revision import Revision
from baton.runtime.config import parse


def start(configured, revision):
    return start_of("w", "decode", revision.over(configured), configured)


@pytest.mark.parametrize(("gpus", "asked"), [(None, None), (0.5, 2.0), (1, 4.0), (0, 0.0)])
def test_a_revision_with_more_ranks_asks_for_more(gpus, asked):
    configured = parse({"ray": {"decode": {"gpus": gpus, "cpus": 3}}}, "test")
    made = start(configured, Revision("r2", "", {"tensor_parallel_size": 4}))
    assert (made.gpus, made.num_ranks, made.cpus) == (asked, 4, 3)
    assert start(configured, Revision("r3")).gpus == gpus


def test_a_simulated_engine_has_no_ranks():
    configured = parse({"engine": "simulated", "ray": {"decode": {"gpus": 1}}}, "test")
    made = start(configured, Revision("r2", "", {"tensor_parallel_size": 4}))
    assert (made.gpus, made.num_ranks) == (1, 0)
