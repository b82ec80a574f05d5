"""The balancer of the benchmarks: each prompt goes to the server with the fewest prompts."""

from __future__ import annotations

import asyncio

import pytest

from baton.bench.streams import Timed, least_loaded


async def test_each_prompt_goes_to_the_server_with_the_fewest_prompts_in_flight():
    sent: list[tuple[int, list[int]]] = []
    gates = [asyncio.Event(), asyncio.Event()]

    def server(index):
        async def send(prompt):
            sent.append((index, prompt))
            await gates[index].wait()
            return Timed(token_ids=[index])

        return send

    send = least_loaded([server(0), server(1)])
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send([number])) for number in range(4)]
        await asyncio.sleep(0)
        assert sent == [(0, [0]), (1, [1]), (0, [2]), (1, [3])]
        gates[1].set()
        await asyncio.wait({tasks[1], tasks[3]})
        assert (await send([4])).token_ids == [1]
        assert (await send([5])).token_ids == [1]
        gates[0].set()
    assert [task.result().token_ids for task in tasks] == [[0], [1], [0], [1]]


async def test_a_prompt_that_fails_is_not_in_flight_any_more():
    async def broken(prompt):
        raise RuntimeError("broken")

    async def works(prompt):
        return Timed(token_ids=prompt)

    send = least_loaded([broken, works])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            await send([1])
        assert (await send([2])).token_ids == [2]
