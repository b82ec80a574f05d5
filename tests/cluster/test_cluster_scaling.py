"""Pools that size themselves, flips and sizes by hand, with real processes and a real launcher."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import load_steps
from load_steps import DECODE, PREFILL, baton, decoding, ids, prompt, serving, until

from baton.client import AdminClient, BatonClient


async def test_pools_follow_their_load_and_no_request_fails(up):
    cluster = up(**load_steps.autoscaled())
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        # Outputs alone: short prompts, many tokens.
        prompts = [prompt(8) for _ in range(16)]
        answers = [
            asyncio.create_task(client.complete(one, max_tokens=60, timeout_s=60))
            for one in prompts
        ]
        grown = await until(cluster, lambda event: serving(event, DECODE) >= 2)
        assert serving(grown, PREFILL) == 1
        for one, answer in zip(prompts, await asyncio.gather(*answers), strict=True):
            assert answer.token_ids == cluster.expected(one, 60)

        # Prompts alone: twice, thrice, four times as many and more.
        await load_steps.prefill_follows_prompts(cluster, client, admin)
    await cluster.nothing_left()


async def test_flips_deaths_and_sizes_by_hand(up):
    cluster = up(**load_steps.sections(autoscale=False), prefill={"workers": 1})
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:

        async def kill(worker):
            os.kill(worker.pid, signal.SIGKILL)

        latest = await load_steps.flips_and_deaths(cluster, client, kill)
        code, _, said = await baton(cluster, "flip", latest, "prefill")
        assert code == 1
        assert f"{latest} is the only one that serves decode" in said

        # What is set by hand wins over autoscaling, and the coordinator says so.
        await admin.set_autoscale(enabled=True)
        code, told, _ = await baton(cluster, "scale", "decode", "2", "--json")
        assert code == 0
        assert "wins over autoscaling" in json.loads(told)["message"]
        await until(cluster, lambda event: serving(event, DECODE) == 2)
        code, told, _ = await baton(cluster, "why", "decode")
        assert code == 0
        assert "held at 2, set by hand" in told

        # A drained worker leaves with nothing lost.
        one = prompt(20)
        stream = await decoding(client, one, 60)
        assert f"{latest} takes nothing new" in await admin.drain_worker(latest)
        await stream.complete()
        assert stream.token_ids == cluster.expected(one, 60)
        await until(cluster, lambda event: latest not in ids(event, DECODE))
    await cluster.nothing_left()
