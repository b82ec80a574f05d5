"""Steps of tests that scale pools under load; local and Ray launchers share them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import time
from collections import deque
from collections.abc import Awaitable, Callable

from baton.client import AdminClient, BatonClient, Tokens
from baton.runtime.network import rpc
from baton.v1 import admin_pb2, cluster_pb2, common_pb2
from tests.cluster.processes import COMMAND, START_S, Cluster

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
# Pools shrink only after two minutes of low load.
CALM_S = START_S + 150.0
# Timeout of a request in seconds; it only bounds a test that hangs.
WAIT_S = 120
# TTFT target of the autoscaler in seconds.
TTFT_S = 0.5
# A TTFT in seconds that shows that the queue is empty again: the wait grows by many seconds while
# the pool is too small. The margin to the target absorbs delays of a busy machine.
CAUGHT_UP_TTFT_S = 2.0
# A prompt of 200 tokens takes 0.2 s. A step with 7 decodes takes 45 ms; the ITL target is 50 ms.
SPEED = {
    "prefill_base_ms": 4.0,
    "prefill_per_token_ms": 1.0,
    "prefill_per_token_squared_ms": 0.0,
    "step_base_ms": 10.0,
    "step_per_request_ms": 5.0,
    "step_per_kv_token_ms": 0.0,
}
# Most requests of a Load without an answer.
_MOST_UNANSWERED = 64
LIMITS = {"min_workers": 1, "max_workers": 3}
SALTS = itertools.count(1)


def sections(**scaling):
    """Returns the configuration sections of a cluster with up to 3 workers per pool."""
    limits = {"prefill": LIMITS, "decode": LIMITS}
    speed = {"simulated": SPEED, "latency": SPEED, "decode": {"local_prefill": False}}
    # Requests wait in the queue while workers start, which can take long on a busy machine.
    lanes = {"interactive": {"max_queue_s": WAIT_S}}
    return {
        **speed,
        "coordinator": {"max_recovery_s": WAIT_S},
        "lanes": lanes,
        "scaling": limits | scaling,
    }


def autoscaled():
    targets = {"interactive": {"ttft_ms": round(TTFT_S * 1e3), "itl_ms": 50}}
    times = {"interval_s": 0.4, "cold_start_s": 2.0, "down_window_s": 3.0}
    return sections(autoscale=True, targets=targets, flip=False, **times)


def prompt(num_tokens):
    """Returns a new prompt each time, so that no prefix is cached."""
    salt = next(SALTS)
    return [5 + salt % 200, 5 + salt // 200, *range(5, num_tokens + 3)]


async def until(cluster, done, within_s=START_S):
    """Waits for the first event of Admin.Watch for which `done` is true, and returns it.

    The limit is that of a worker's start, because most waits are for a pool that grows: on a busy
    machine Ray needs minutes for that. For the same reason, pings may be answered as late.
    """
    async with rpc.channel(cluster.address, ping_timeout_s=within_s) as channel:
        admin = AdminClient.from_channel(channel, cluster.address, timeout_s=within_s)
        async with (
            asyncio.timeout(within_s),
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
    """Runs the CLI; returns its exit code, standard output and standard error."""

    def run():
        env = os.environ | {"BATON_ADDRESS": cluster.address}
        return subprocess.run(
            [*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=2 * START_S
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
    """Sends requests at a rate that a test can change, and checks every answer.

    On a busy machine it sends fewer: at most `_MOST_UNANSWERED` wait for an answer. The requests
    have no timeout, because the coordinator would rightly refuse those that it predicts to end
    too late. The tests' own waits have deadlines.
    """

    def __init__(self, cluster, client):
        self.rate = 1.0
        self._num_unanswered = 0
        self._cluster, self._client = cluster, client
        self._ttfts_s: deque[float] = deque(maxlen=8)

    async def run(self):
        async with asyncio.TaskGroup() as group:
            while self.rate:
                if self._num_unanswered < _MOST_UNANSWERED:
                    self._num_unanswered += 1
                    group.create_task(self._one())
                await asyncio.sleep(1 / self.rate)

    async def within(self, ttft_s):
        """Waits until the last 8 requests had a TTFT of at most `ttft_s` seconds."""
        self._ttfts_s.clear()
        async with asyncio.timeout(START_S):
            while len(self._ttfts_s) < 8 or max(self._ttfts_s) > ttft_s:
                await asyncio.sleep(0.1)

    async def _one(self):
        tokens, begun_at, ttft_s = prompt(200), time.monotonic(), None
        stream = self._client.generate(tokens, max_tokens=2)
        async for event in stream:
            if ttft_s is None and isinstance(event, Tokens):
                ttft_s = time.monotonic() - begun_at
        assert tuple(stream.token_ids) == self._cluster.expected(tokens, 2)
        self._num_unanswered -= 1
        self._ttfts_s.append(ttft_s)


async def decode_follows_outputs(cluster: Cluster, client: BatonClient) -> None:
    """Sends short prompts with long outputs: only the decode pool grows."""
    grown = asyncio.Event()

    async def ask() -> None:
        # The load lasts until the new worker serves: otherwise the pool might shrink before that.
        while not grown.is_set():
            one = prompt(8)
            answer = await client.complete(one, max_tokens=60, timeout_s=WAIT_S)
            assert answer.token_ids == cluster.expected(one, 60)

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(ask())
        event = await until(cluster, lambda event: serving(event, DECODE) >= 2)
        grown.set()
    assert serving(event, PREFILL) == 1


async def prefill_follows_prompts(
    cluster: Cluster, client: BatonClient, admin: AdminClient
) -> None:
    """Raises the rate in four steps until the prefill pool grows."""
    load = Load(cluster, client)
    # The task group ends the test with the error of a failed request.
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run())
        for rate in (2.0, 4.0, 6.0, 8.0):
            await asyncio.sleep(0.5)
            load.rate = rate
        await until(cluster, lambda event: serving(event, PREFILL) >= 2)
        async with asyncio.timeout(START_S):
            # A new worker may leave before it computes a prompt, so any new worker counts.
            while not await new_computed(admin):
                await asyncio.sleep(0.1)
        # On a slow machine, no request may have come in the seconds before the latest decision.
        assert any(
            "prompts" in one.reason and one.inputs["interactive_requests_per_s"] > 0
            for one in await admin.list_decisions(PREFILL)
        )
        await load.within(CAUGHT_UP_TTFT_S)
        load.rate = 0.0


async def pools_shrink(cluster: Cluster, admin: AdminClient) -> None:
    """Waits until both pools have one worker again; no request has failed."""
    # Higher targets let the pools shrink sooner, because the autoscaler considers the load of the
    # last two minutes.
    lax = admin_pb2.LaneTargets(lane=common_pb2.LANE_INTERACTIVE, ttft_ms=10_000, itl_ms=500)
    await admin.set_targets([lax])
    await until(cluster, lambda event: len(event.workers) == 2, CALM_S)
    requests = await admin.list_requests(include_ended=True)
    assert [one.error for one in requests if one.error] == []


async def a_size_by_hand_wins(cluster: Cluster, admin: AdminClient) -> None:
    """A size set with `baton scale` overrides autoscaling, and the coordinator reports that."""
    await admin.set_autoscale(enabled=True)
    code, told, _ = await baton(cluster, "scale", "decode", "2", "--json")
    assert code == 0
    assert "autoscaling keeps this size" in json.loads(told)["message"]
    await until(cluster, lambda event: serving(event, DECODE) == 2)
    code, told, _ = await baton(cluster, "why", "decode")
    assert code == 0
    assert "held at 2, set by hand" in told


async def new_computed(admin: AdminClient) -> bool:
    """Returns whether a prefill worker that started later computed a prompt."""
    requests = await admin.list_requests(include_ended=True)
    return any(one.prefill_worker_id not in ("", "prefill-0") for one in requests)


async def flips_and_deaths(
    cluster: Cluster, client: BatonClient, kill: Callable[[admin_pb2.WorkerInfo], Awaitable[None]]
) -> str:
    """Flips a decode worker under load and kills the other one: no token is lost.

    Args:
        kill: Kills a worker process.

    Returns:
        ID of the new decode worker; two other workers serve prefill.
    """
    code, told, said = await baton(cluster, "scale", "decode", "2", "--wait", f"{START_S:g}")
    assert (code, told.split(";")[0]) == (
        0,
        "the target size of the decode pool is 2 workers",
    ), said
    event = await until(cluster, lambda event: serving(event, DECODE) == 2)
    flipped, stays = sorted(ids(event, DECODE), reverse=True)

    # Some outputs move to another worker; all stay complete.
    prompts = [prompt(20) for _ in range(6)]
    streams = [await decoding(client, one, 120) for one in prompts]
    code, _, said = await baton(cluster, "flip", flipped, "prefill", "--wait", f"{START_S:g}")
    assert code == 0, said
    late = prompt(200)
    answers = [asyncio.create_task(client.complete(late, max_tokens=4)) for _ in range(4)]
    for one, stream in zip(prompts, streams, strict=True):
        await stream.complete()
        assert stream.token_ids == cluster.expected(one, 120)
    for answer in await asyncio.gather(*answers):
        assert answer.token_ids == cluster.expected(late, 4)

    # The launcher replaces a killed worker, and its stream continues.
    stream = await decoding(client, prompts[0], 100)
    event = await until(cluster, lambda event: serving(event, PREFILL) == 2)
    (victim,) = (one for one in event.workers if one.worker_id == stays)
    await kill(victim)
    replaced = await until(
        cluster, lambda event: ids(event, DECODE) and stays not in ids(event, DECODE)
    )
    await stream.complete()
    assert stream.token_ids == cluster.expected(prompts[0], 100)
    (new,) = ids(replaced, DECODE)
    assert new not in (flipped, stays)
    return new
