"""Random events in a cell: every stream ends once, with its own tokens or a justified error.

random_cell.py and random_clients.py contain the assertions.
"""

from __future__ import annotations

import pytest

from tests.coordinator.random_cell import RandomCell
from tests.coordinator.random_events import RandomEvents

_SECONDS = 30.0


def run(seed: int, *, faults: bool) -> RandomCell:
    cell = RandomCell(seed, faults=faults)
    try:
        RandomEvents(cell).run(_SECONDS)
        cell.finish_and_check()
    except Exception:
        print(cell.recent_events())
        raise
    return cell


@pytest.mark.seeds(15)
def test_no_request_fails_in_a_cell_without_faults(seed):
    cell = run(seed, faults=False)
    assert cell.clients.outcomes["finished"]


@pytest.mark.seeds(15)
def test_every_stream_ends_correctly_in_a_cell_with_faults(seed):
    run(seed, faults=True)
