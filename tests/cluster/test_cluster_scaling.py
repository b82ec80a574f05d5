"""Pools that size themselves, flips and sizes by hand, with real processes and a real launcher."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess

import pytest
from processes import COMMAND, UpCluster

from baton.client import AdminClient, BatonClient, Tokens
from baton.v1 import admin_pb2, cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
SOON_S = 40.0
# A prompt of 200 tokens takes 0.2 s; 7 requests at a time are decoded within 50 ms.
SPEED = {
    "prefill_base_ms": 4.0,
    "prefill_per_token_ms": 1.0,
    "prefill_per_token_squared_ms": 0.0,
    "step_base_ms": 10.0,
    "step_per_request_ms": 5.0,
    "step_per_kv_token_ms": 0.0,
}
LIMITS = {"min_workers": 1, "max_workers": 3}
SECTIONS = {"simulated": SPEED, "latency": SPEED, "decode": {"local_prefill": False}}
SALTS = itertools.count(1)


@pytest.fixture
def up(tmp_path, model):
    """Makes a running `baton up`; nothing of it is left afterwards."""
    with contextlib.ExitStack() as stack:

        def make(scaling, **sections):
            limits = {"prefill": LIMITS, "decode": LIMITS}
            sections = SECTIONS | {"scaling": limits | scaling} | sections
            return stack.enter_context(UpCluster(tmp_path, model, **sections))

        yield make


def prompt(num_tokens):
    """Never the same, so that no cache knows it."""
    salt = next(SALTS)
    return [5 + salt % 200, 5 + salt // 200, *range(5, num_tokens + 3)]


async def until(cluster, done):
    """The first event of Admin.Watch for which something is so."""
    async with (
        AdminClient(cluster.address) as admin,
        asyncio.timeout(SOON_S),
        contextlib.aclosing(admin.watch(0.1)) as events,
    ):
        async for event in events:
            if done(event):
                return event
    raise AssertionError("the coordinator stopped")


def serving(event, role):
    return next(one.num_serving for one in event.pools.pools if one.role == role)


def ids(event, role):
    found = (one for one in event.workers if one.role == role)
    return {one.worker_id for one in found if one.state == cluster_pb2.WORKER_STATE_SERVING}


async def baton(cluster, *arguments):
    """The command line: exit code, standard output, standard error."""

    def run():
        env = os.environ | {"BATON_ADDRESS": cluster.address}
        return subprocess.run(
            [*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=30
        )

    done = await asyncio.to_thread(run)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


async def decoding(client, tokens, num_tokens):
    stream = client.generate(tokens, max_tokens=num_tokens)
    async for event in stream:
        if isinstance(event, Tokens) and len(stream.token_ids) >= 3:
            return stream
    raise AssertionError("ended early")


class Load:
    """Requests that arrive at a rate which can be changed; every answer is checked."""

    def __init__(self, cluster, client):
        self.rate = 1.0
        self.served_by = set()
        self._cluster, self._client = cluster, client
        self._running = set()
        self.num_done = 0

    async def run(self):
        async with asyncio.TaskGroup() as group:
            while self.rate:
                group.create_task(self._one())
                await asyncio.sleep(1 / self.rate)

    async def _one(self):
        tokens = prompt(200)
        answer = await self._client.complete(tokens, max_tokens=2, timeout_s=30)
        assert answer.token_ids == self._cluster.expected(tokens, 2)
        self.num_done += 1


async def test_pools_follow_their_load_and_no_request_fails(up):
    targets = {"interactive": {"ttft_ms": 500, "itl_ms": 50}}
    times = {"interval_s": 0.4, "cold_start_s": 2.0, "down_window_s": 3.0, "flip": False}
    cluster = up({"autoscale": True, "targets": targets, **times})
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
        load = Load(cluster, client)
        running = asyncio.create_task(load.run())
        for rate in (2.0, 4.0, 6.0, 8.0):
            await asyncio.sleep(0.5)
            load.rate = rate
        grown = await until(cluster, lambda event: serving(event, PREFILL) >= 2)
        new = ids(grown, PREFILL) - {"prefill-0"}
        async with asyncio.timeout(SOON_S):
            while True:
                requests = await admin.list_requests(include_ended=True)
                if new & {one.prefill_worker_id for one in requests}:
                    break
                await asyncio.sleep(0.1)
        latest, *_ = await admin.list_decisions(PREFILL)
        assert "prompts" in latest.reason
        assert latest.inputs["interactive_requests_per_s"] > 0
        load.rate = 0.0
        await running

        # Nothing more: both shrink, sooner where less is promised, since two minutes count.
        lax = admin_pb2.LaneTargets(lane=common_pb2.LANE_INTERACTIVE, ttft_ms=3000)
        await admin.set_targets([lax])
        await until(cluster, lambda event: len(event.workers) == 2)
        requests = await admin.list_requests(include_ended=True)
        assert [one.error for one in requests if one.error] == []
    await cluster.nothing_left()


async def test_flips_deaths_and_sizes_by_hand(up):
    cluster = up({"autoscale": False}, prefill={"workers": 1})
    async with BatonClient(cluster.address) as client, AdminClient(cluster.address) as admin:
        code, told, _ = await baton(cluster, "scale", "decode", "2", "--wait", "20")
        assert (code, told.split(";")[0]) == (0, "decode is to have 2 workers")

        # A flip under load: some outputs move, none loses a token.
        prompts = [prompt(20) for _ in range(6)]
        streams = [await decoding(client, one, 120) for one in prompts]
        code, _, said = await baton(cluster, "flip", "decode-1", "prefill", "--wait", "20")
        assert code == 0, said
        late = prompt(200)
        asked = [asyncio.create_task(client.complete(late, max_tokens=4)) for _ in range(4)]
        for one, stream in zip(prompts, streams, strict=True):
            await stream.complete()
            assert stream.token_ids == cluster.expected(one, 120)
        for answer in await asyncio.gather(*asked):
            assert answer.token_ids == cluster.expected(late, 4)
        code, _, said = await baton(cluster, "flip", "decode-0", "prefill")
        assert code == 1
        assert "decode-0 is the only one that serves decode" in said

        # A killed worker is replaced, and its stream goes on.
        stream = await decoding(client, prompts[0], 100)
        event = await until(cluster, lambda event: serving(event, PREFILL) == 2)
        (victim,) = (one for one in event.workers if one.worker_id == "decode-0")
        os.kill(victim.pid, signal.SIGKILL)
        replaced = await until(
            cluster, lambda event: ids(event, DECODE) and "decode-0" not in ids(event, DECODE)
        )
        assert ids(replaced, DECODE) == {"decode-2"}
        await stream.complete()
        assert stream.token_ids == cluster.expected(prompts[0], 100)

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
        stream = await decoding(client, prompts[1], 60)
        assert "decode-2 takes nothing new" in await admin.drain_worker("decode-2")
        await stream.complete()
        assert stream.token_ids == cluster.expected(prompts[1], 60)
        await until(cluster, lambda event: "decode-2" not in ids(event, DECODE))
    await cluster.nothing_left()
