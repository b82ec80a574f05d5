"""How many lines of batches run, by the test's clock."""

import asyncio
import math

from baton.gateway.batches.pace import FairSlots, Pace


def test_a_refusal_pauses_and_halves_once_per_pause():
    pace = Pace(8)
    assert pace.wait_s(0.0, 7) == 0.0
    assert pace.wait_s(0.0, 8) == math.inf
    for _ in range(8):
        pace.refused(0.0, 2.0)
    assert pace.wait_s(0.5, 0) == 1.5
    assert (pace.wait_s(2.0, 3), pace.wait_s(2.0, 4)) == (0.0, math.inf)
    for _ in range(10):
        pace.refused(100.0, 1.0)
        pace.refused(200.0, 1.0)
    assert (pace.wait_s(300.0, 0), pace.wait_s(300.0, 1)) == (0.0, math.inf)


def test_lines_that_finish_raise_the_limit_again():
    pace = Pace(3)
    pace.refused(0.0, 1.0)
    pace.finished()
    assert (pace.wait_s(1.0, 1), pace.wait_s(1.0, 2)) == (0.0, math.inf)
    for _ in range(10):
        pace.finished()
    assert (pace.wait_s(1.0, 2), pace.wait_s(1.0, 3)) == (0.0, math.inf)


async def test_a_free_slot_goes_to_the_caller_with_the_fewest():
    slots, order = FairSlots(2), []

    async def take(owner):
        await slots.take(owner)
        order.append(owner)

    await take(b"a")
    await take(b"a")
    waiting = [asyncio.create_task(take(owner)) for owner in (b"a", b"a", b"b", b"c")]
    await asyncio.sleep(0)
    for owner in (b"a", b"a", b"b", b"c"):
        slots.give_back(owner)
        await asyncio.sleep(0)
    assert order == [b"a", b"a", b"b", b"a", b"c", b"a"]
    assert slots.num_held == 2
    await asyncio.gather(*waiting)


async def test_a_slot_is_not_lost_when_its_taker_is_cancelled():
    slots = FairSlots(1)
    await slots.take(b"a")
    early, late, last = (asyncio.create_task(slots.take(b"b")) for _ in range(3))
    await asyncio.sleep(0)
    early.cancel()
    await asyncio.sleep(0)
    slots.give_back(b"a")
    # The slot is given to this task, which does not run any more.
    late.cancel()
    await asyncio.wait_for(last, 60)
    slots.give_back(b"b")
    assert slots.num_held == 0
    await asyncio.wait_for(slots.take(b"c"), 60)
