"""Autoscaling, flips and sizes set by hand, with real processes and a real launcher."""

from __future__ import annotations

import os
import signal

import pytest

from baton.client import AdminClient, BatonClient
from tests.cluster import load_steps
from tests.cluster.load_steps import DECODE, baton, decoding, ids, prompt, until

# Several waits for a pool that grows, each up to the limit of a worker's start.
pytestmark = pytest.mark.timeout(900)


async def test_pools_follow_the_load_and_no_request_fails(up):
    cluster = up(**load_steps.autoscaled())
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        await load_steps.decode_follows_outputs(cluster, client)
        await load_steps.prefill_follows_prompts(cluster, client, admin)
        await load_steps.pools_shrink(cluster, admin)
    await cluster.nothing_left()


async def test_flips_deaths_and_sizes_by_hand(up):
    cluster = up(**load_steps.sections(autoscale=False), prefill={"workers": 1})
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:

        async def kill(worker):
            os.kill(worker.pid, signal.SIGKILL)

        latest = await load_steps.flips_and_deaths(cluster, client, kill)
        code, _, said = await baton(cluster, "flip", latest, "prefill")
        assert code == 1
        assert f"{latest} is the only serving decode worker" in said

        await load_steps.a_size_by_hand_wins(cluster, admin)

        # A drained worker completes its requests before it leaves.
        one = prompt(20)
        stream = await decoding(client, one, 60)
        assert f"{latest} gets no new requests" in await admin.drain_worker(latest)
        await stream.complete()
        assert stream.token_ids == cluster.expected(one, 60)
        await until(cluster, lambda event: latest not in ids(event, DECODE))
    await cluster.nothing_left()
