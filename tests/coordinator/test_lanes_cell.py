"""Shares and waits of tenants and lanes, in the real core under a virtual clock."""

from __future__ import annotations

import pytest

from baton.runtime.config import BatchLaneConfig, InteractiveLaneConfig, LanesConfig, TenantConfig
from baton.v1 import common_pb2
from tests.coordinator.simulated_cell import Cell

INTERACTIVE, BATCH = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH


def lanes(share: float = 0.05, **changes) -> LanesConfig:
    """A configuration whose queue limits are never reached."""
    free = {"max_queued": 10**6, "max_queue_s": 1e6}
    return LanesConfig(
        interactive=InteractiveLaneConfig(**free),
        batch=BatchLaneConfig(**free, share=share),
        **changes,
    )


def jain(values: list[int]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def crowd(say_hello) -> Cell:
    """Four backlogged tenants; "greedy" sends 10 times more requests, 8 times as long."""
    cell = Cell(say_hello, lanes=lanes())
    begin = cell.now
    shapes = {"a": (128, 16), "b": (16, 48), "c": (64, 32)}
    for tenant, (num_prompt, num_output) in shapes.items():
        fields = {"tenant": tenant, "num_prompt": num_prompt, "num_output": num_output}
        cell.every(0.14, begin, begin + 60, **fields)
    cell.every(0.014, begin, begin + 60, tenant="greedy", num_prompt=512, num_output=256)
    return cell


def test_a_greedy_tenant_takes_nothing_from_others(say_hello):
    cell = crowd(say_hello)
    begin = cell.now
    cell.run(begin + 60)
    waiting = {one.submission.tenant for one in cell.core.running() if not one.attempt}
    assert waiting == {"a", "b", "c", "greedy"}
    for second in range(31):
        served = cell.tokens(begin + second, begin + second + 30)
        assert jain([served[one] for one in ("a", "b", "c", "greedy")]) >= 0.95, second


@pytest.mark.parametrize("after_s", [0.003, 7.77, 20.0])
def test_a_new_tenants_request_is_dispatched_next(say_hello, after_s):
    """The request waits only until one running request ends."""
    cell = crowd(say_hello)
    begin = cell.now
    cell.run(begin + 10 + after_s)
    num_before = len(cell.dispatched)
    newcomer = cell.submit("newcomer", num_prompt=2000, num_output=400)
    cell.run(cell.now + 10)
    assert cell.dispatched[num_before] == newcomer


def test_simultaneous_new_tenants_are_dispatched_next_with_one_request_each(say_hello):
    cell = crowd(say_hello)
    cell.run(cell.now + 10)
    num_before = len(cell.dispatched)
    newcomers = [cell.submit(f"new{index}") for index in range(5) for _ in range(3)]
    cell.run(cell.now + 10)
    # Only the first request of each new tenant; the second requests come later.
    assert set(cell.dispatched[num_before : num_before + 5]) == set(newcomers[::3])


def test_weights_are_kept(say_hello):
    tenants = {"two": TenantConfig(weight=2), "four": TenantConfig(weight=4)}
    cell = Cell(say_hello, lanes=lanes(), tenants=tenants)
    begin = cell.now
    cell.every(0.03, begin, begin + 90, tenant="one", num_prompt=128, num_output=16)
    cell.every(0.03, begin, begin + 90, tenant="two", num_prompt=16, num_output=64)
    cell.every(0.03, begin, begin + 90, tenant="four")
    cell.run(begin + 90)
    served = cell.tokens(begin + 10, begin + 90)
    assert served["two"] / served["one"] == pytest.approx(2, rel=0.05)
    assert served["four"] / served["one"] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.25])
def test_batch_gets_its_share_while_interactive_has_more_than_enough(say_hello, share):
    cell = Cell(say_hello, lanes=lanes(share))
    begin = cell.now
    cell.every(0.02, begin, begin + 70, tenant="a")
    cell.every(0.1, begin, begin + 70, tenant="b", lane=BATCH, num_prompt=200, num_output=100)
    cell.run(begin + 70)
    served = cell.tokens(begin + 20, begin + 70, key=2)
    assert served[BATCH] / (served[BATCH] + served[INTERACTIVE]) == pytest.approx(share, abs=0.01)


def test_interactive_goes_first_and_batch_gets_all_that_is_spare(say_hello):
    def run(interactive: bool) -> Cell:
        cell = Cell(say_hello, lanes=lanes())
        begin = cell.now
        cell.every(0.01, begin, begin + 60, lane=BATCH)
        if interactive:
            cell.every(0.13, begin + 5, begin + 60)
        cell.run(begin + 60)
        return cell

    alone, both = run(interactive=False), run(interactive=True)
    total, total_alone = (sum(one.tokens(1010, 1060, key=2).values()) for one in (both, alone))
    assert total >= 0.98 * total_alone
    waits_s = [wait_s for lane, wait_s in both.waits if lane == INTERACTIVE]
    assert len(waits_s) > 400
    # Batch requests are parked at once and recomputed later.
    assert max(waits_s) <= Cell.step_s


def test_the_batch_lanes_unused_share_does_not_accumulate(say_hello):
    cell = Cell(say_hello, lanes=lanes())
    begin = cell.now
    cell.every(0.02, begin, begin + 35)
    cell.run(begin + 30)
    cell.every(0.01, begin + 30, begin + 35, lane=BATCH)
    cell.run(begin + 35)
    served = cell.tokens(begin + 30, begin + 35, key=2)
    assert served[BATCH] <= 0.08 * (served[BATCH] + served[INTERACTIVE])
