"""The order in which the lines of a batch start, with refusals of the test."""

import asyncio

from baton.gateway.batches import line_queue
from baton.gateway.batches.batch_store import Line
from baton.gateway.batches.line_queue import LineQueue

WAIT_S = 60.0


def queue_of(*model_numbers, max_running=1):
    """A queue of lines with these models, and the numbers of the lines that it has fetched."""
    lines = [Line(n, str(n), b"", model) for n, model in enumerate(model_numbers, 1)]
    fetched = []

    async def fetch(model_number, after):
        found = [one for one in lines if one.model_number == model_number and one.number > after]
        fetched.extend(one.number for one in found[:1])
        return found[:1]

    return LineQueue(fetch, dict.fromkeys(model_numbers), max_running), fetched


async def take(queue):
    return await asyncio.wait_for(queue.get(), WAIT_S)


async def test_models_take_turns_and_a_refusal_pauses_one_of_them():
    queue, _ = queue_of(0, 0, 0, 1, 1, 1)
    first, other = await take(queue), await take(queue)
    assert (first.number, other.number) == (1, 4)
    queue.refused(first, 10 * WAIT_S)
    for number in (5, 6):
        queue.done(other)
        other = await take(queue)
        assert other.number == number


async def test_a_refused_line_runs_after_the_others_of_its_model():
    queue, _ = queue_of(0, 0, 0)
    queue.refused(await take(queue), 0.0)
    order = []
    while (line := await take(queue)) is not None:
        order.append(line.number)
        queue.done(line)
    assert order == [2, 3, 1]


async def test_few_refused_lines_are_kept(monkeypatch):
    monkeypatch.setattr(line_queue, "_MAX_REFUSED", 3)
    queue, fetched = queue_of(*[0] * 10)
    tried = []
    for _ in range(6):
        line = await take(queue)
        tried.append(line.number)
        queue.refused(line, 0.0)
    assert tried == [1, 2, 3, 1, 2, 3]
    assert fetched == [1, 2, 3]
    while (line := await take(queue)) is not None:
        queue.done(line)
    assert fetched == list(range(1, 11))
