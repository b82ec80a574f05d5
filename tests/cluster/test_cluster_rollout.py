"""A rollout with real processes: the CLI starts, promotes and aborts; no token is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess

import psutil

from baton.client import AdminClient, BatonClient, Tokens
from baton.v1 import admin_pb2
from tests.cluster.processes import COMMAND, START_S

# Timeout of a wait in seconds; it only bounds a test that hangs.
SOON_S = 90.0
SALTS = itertools.count(1)


def prompt():
    """Returns a new prompt each time, so that no prefix is cached."""
    salt = next(SALTS)
    return [5 + salt % 200, 5 + salt // 200, *range(5, 43)]


async def baton(cluster, *arguments):
    """Runs the CLI, which must succeed; returns its standard output."""

    def run():
        env = os.environ | {"BATON_ADDRESS": cluster.address}
        return subprocess.run(
            [*COMMAND, *arguments], env=env, capture_output=True, text=True, timeout=2 * START_S
        )

    done = await asyncio.to_thread(run)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def status(cluster):
    return json.loads(await baton(cluster, "rollout", "status", "--json"))


class Load:
    """Sessions that send one request after another, and check every answer."""

    def __init__(self, cluster, client, num_sessions):
        self._cluster, self._client, self._num_sessions = cluster, client, num_sessions
        self._over = False
        self.num_done = 0

    async def run(self):
        async with asyncio.TaskGroup() as group:
            for number in range(self._num_sessions):
                group.create_task(self._session(f"s{number}"))

    def stop(self):
        self._over = True

    async def _session(self, session):
        while not self._over:
            tokens = prompt()
            answer = await self._client.complete(
                tokens, max_tokens=24, session_id=session, timeout_s=SOON_S
            )
            assert answer.token_ids == self._cluster.expected(tokens, 24)
            self.num_done += 1


async def decoding(client, tokens, num_tokens, **fields):
    stream = client.generate(tokens, max_tokens=num_tokens, **fields)
    async for event in stream:
        if isinstance(event, Tokens) and len(stream.token_ids) >= 3:
            return stream
    raise AssertionError("ended early")


async def finished(stream):
    async for _ in stream:
        pass
    return tuple(stream.token_ids)


async def workers(cluster):
    async with AdminClient(cluster.address) as admin:
        return {one.worker_id: one for one in await admin.list_workers()}


async def only(cluster, revision, number):
    """Waits until exactly `number` workers are attached, all of this revision."""
    async with asyncio.timeout(SOON_S):
        while [one.revision for one in (await workers(cluster)).values()] != [revision] * number:
            await asyncio.sleep(0.1)


async def test_start_promote_and_abort_under_load(up):
    # Slow steps leave more CPU time to the workers that start.
    cluster = up(simulated={"step_base_ms": 16})
    async with BatonClient(cluster.address) as client:
        load = Load(cluster, client, 6)
        running = asyncio.create_task(load.run())
        told = await baton(
            cluster,
            *("rollout", "start", "--revision", "r2", "--share", "50%", "--decode", "2"),
            *("--engine-arg", "max-num-seqs=32", "--wait", f"{START_S:g}"),
        )
        assert "1 prefill and 2 decode workers are being started" in told
        # The canary serves with one worker in each pool; the third may start later.
        wanted = {"prefill-r2-0", "decode-r2-0", "decode-r2-1"}
        async with asyncio.timeout(SOON_S):
            while wanted - (found := await workers(cluster)).keys():
                await asyncio.sleep(0.1)
        assert {name for name, one in found.items() if one.revision == "r2"} == wanted
        digests = {one.config_digest for one in found.values()}
        assert len(digests) == 2

        # A stream of the canary loses its worker; the fleet's other decode worker continues it.
        await baton(cluster, "rollout", "share", "100%")
        tokens = prompt()
        stream = await decoding(client, tokens, 400)
        async with AdminClient(cluster.address) as admin:
            found = await workers(cluster)
            held = await admin.list_requests()
            decoder = next(
                one.decode_worker_id for one in held if one.request_id == stream.request_id
            )
        psutil.Process(found[decoder].pid).send_signal(signal.SIGKILL)
        assert await finished(stream) == cluster.expected(tokens, 400)

        seen = await status(cluster)
        assert seen["phase"] in ("running", "waiting")
        assert seen["canary"]["name"] == "r2"
        assert seen["canary"]["engine_args"] == {"max_num_seqs": "32"}
        assert seen["canary"]["num_recoveries"] >= 1
        assert seen["canary"]["errors"] == seen["stable"]["errors"] == {}
        assert seen["verdict_reason"]
        shown = await baton(cluster, "rollout", "status")
        assert "rollout of r2" in shown
        assert "engine_args.max_num_seqs: 32" in shown

        told = await baton(cluster, "rollout", "promote", "--wait", f"{START_S:g}")
        assert "set worker.revision: r2" in told
        # The pools keep their sizes.
        await only(cluster, "r2", 2)

        await baton(
            cluster,
            "rollout",
            "start",
            "--revision",
            "r3",
            "--share",
            "1",
            "--wait",
            f"{START_S:g}",
        )
        tokens = prompt()
        stream = await decoding(client, tokens, 400)
        assert "finish the" in await baton(cluster, "rollout", "abort")
        # The stream ends in the fleet that began it.
        assert await finished(stream) == cluster.expected(tokens, 400)
        before = load.num_done
        await only(cluster, "r2", 2)
        load.stop()
        await running
        assert load.num_done > before
    seen = await status(cluster)
    assert (seen["phase"], seen["stable"]["name"]) == ("unspecified", "r2")
    assert seen["last"].startswith("revision 'r3' was aborted")
    await cluster.nothing_left()


async def test_a_rollout_and_its_streams_outlive_the_coordinator(new_cluster):
    cluster = new_cluster("p1", "d1")
    for role, name in (("prefill", "cp"), ("decode", "cd")):
        cluster.start_worker(role, name, "--revision", "r2")
    await cluster.attached("p1", "d1", "cp", "cd")
    await baton(cluster, "rollout", "start", "--revision", "r2", "--share", "100%")
    async with BatonClient(cluster.address) as client:
        tokens = prompt()
        stream = await decoding(client, tokens, 1000)
        cluster.restart_coordinator()
        assert await finished(stream) == cluster.expected(tokens, 1000)
        assert stream.num_resumes == 1
        async with AdminClient(cluster.address) as admin, asyncio.timeout(SOON_S):
            while (await admin.get_rollout()).phase != admin_pb2.ROLLOUT_PHASE_RUNNING:
                await asyncio.sleep(0.1)
        await client.complete(prompt(), max_tokens=4)
        seen = await status(cluster)
        assert (seen["canary"]["name"], seen["share"]) == ("r2", 1.0)
        assert seen["canary"]["num_ended"] >= 1
        assert seen["stable"]["num_ended"] == 0
        await baton(cluster, "rollout", "promote")
        await only(cluster, "r2", 2)
        answer = await client.complete(tokens, max_tokens=4)
        assert answer.token_ids == cluster.expected(tokens, 4)
        assert await cluster.exit_code("p1") == 0
