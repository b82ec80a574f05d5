"""Whatever happens to a cell, every stream ends once, with its own tokens or with a reason.

What a random cell holds at every moment is said in random_cell.py and random_clients.py.
"""

from __future__ import annotations

import pytest
from random_cell import RandomCell
from random_events import RandomEvents

_SECONDS = 30.0


def run(seed: int, *, faults: bool) -> RandomCell:
    cell = RandomCell(seed, faults=faults)
    try:
        RandomEvents(cell).happen(_SECONDS)
        cell.come_to_rest()
    except Exception:
        print(cell.story())
        raise
    return cell


@pytest.mark.seeds(15)
def test_nothing_fails_where_nothing_breaks(seed):
    cell = run(seed, faults=False)
    assert cell.clients.outcomes["finished"]


@pytest.mark.seeds(15)
def test_whatever_breaks_every_stream_ends_rightly(seed):
    run(seed, faults=True)
