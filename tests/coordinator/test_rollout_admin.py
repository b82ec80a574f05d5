"""The Admin service's calls on rollouts over a real server, with workers attached by hand."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.client import AdminClient, BatonClient, errors
from baton.coordinator.server.server import Coordinator
from baton.runtime.network import rpc
from baton.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, common_pb2
from tests.coordinator.scripted_worker import WAIT_S, ScriptedWorker

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
WAITING = admin_pb2.ROLLOUT_PHASE_WAITING
RUNNING = admin_pb2.ROLLOUT_PHASE_RUNNING
NONE = admin_pb2.ROLLOUT_PHASE_UNSPECIFIED


class Leaves(ScriptedWorker):
    """A worker that drains and leaves as it is told."""

    async def _serve(self, message):
        kind = message.WhichOneof("message")
        if kind == "drain":
            change = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_DRAINING)
            await self.say(state_changed=change)
        elif kind == "release":
            await self.leave()
        else:
            await super()._serve(message)


@pytest.fixture
async def cell(coordinator_config, say_hello):
    """A coordinator with one pair of workers of "1", which has an adapter, and one of "r2"."""
    async with Coordinator(coordinator_config()) as coordinator:
        hellos = [
            say_hello(name, role, revision=revision)
            for name, role, revision in (
                ("p", PREFILL, ""),
                ("d", DECODE, ""),
                ("cp", PREFILL, "r2"),
                ("cd", DECODE, "r2"),
            )
        ]
        for hello in hellos[:2]:
            hello.model.adapters.add(name="law")
        workers = [Leaves(coordinator.address, hello) for hello in hellos]
        try:
            for worker in workers:
                await worker.connect()
            async with AdminClient(coordinator.address) as admin:
                yield coordinator, admin
        finally:
            for worker in workers:
                await worker.close()
        coordinator.shell.core.check_integrity()


def scraped(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (one.name, tuple(sorted(one.labels.items()))): one.value
            for family in families
            for one in family.samples
        }


async def workers_of(admin):
    return {one.worker_id: one.revision for one in await admin.list_workers()}


async def only_left(admin, revision):
    async with asyncio.timeout(WAIT_S):
        while set((await workers_of(admin)).values()) != {revision}:
            await asyncio.sleep(0.02)


async def test_a_rollout_from_start_to_promotion(cell):
    coordinator, admin = cell
    found = await admin.get_rollout()
    assert (found.phase, found.stable.name, found.HasField("canary")) == (NONE, "1", False)
    # A fleet without a rollout.
    assert [one.name for one in found.others] == ["r2"]
    assert [pool.num_serving for pool in (await admin.list_pools()).pools] == [1, 1]
    message = await admin.start_rollout("r2", share=0.5)
    assert message == "revision r2 gets 50 % of new sessions from now on"
    async with BatonClient(coordinator.address) as client:
        for number in range(24):
            answer = await client.complete(
                [1, 2, 3, number], max_tokens=3, session_id=f"s{number}", timeout_s=WAIT_S
            )
            assert answer.token_ids == (0, 1, 2)
        found = await admin.get_rollout()
        assert (found.phase, found.share) == (RUNNING, 0.5)
        assert not found.others
        fleets = [found.stable, found.canary]
        assert [one.name for one in fleets] == ["1", "r2"]
        assert sum(one.num_ended for one in fleets) == sum(one.num_admitted for one in fleets) == 24
        assert all(one.num_ended for one in fleets)
        for one in fleets:
            interactive = next(x for x in one.lanes if x.lane == common_pb2.LANE_INTERACTIVE)
            assert interactive.ttft.num == one.num_ended
            assert interactive.itl.num == 2 * one.num_ended
            assert [(pool.num_serving, pool.num_starting) for pool in one.pools] == [(1, 0)] * 2
        assert found.verdict == admin_pb2.ROLLOUT_VERDICT_TOO_FEW_SAMPLES
        assert found.verdict_reason.startswith("too few samples to tell")
        samples = await asyncio.to_thread(scraped, coordinator.metrics_address)
        assert samples["baton_rollout_share", ()] == 0.5
        for label, one in (("stable", found.stable), ("canary", found.canary)):
            ended = ("outcome", "ended"), ("revision", label)
            assert samples["baton_rollout_requests_total", ended] == one.num_ended
            p95 = ("lane", "interactive"), ("quantile", "0.95"), ("revision", label)
            assert samples["baton_rollout_ttft_seconds", p95] > 0
        assert "25 % of new sessions" in await admin.set_rollout_share(0.25)
        message = await admin.promote_rollout()
        assert message.startswith("revision r2 is the stable one; the workers of 1 finish")
        assert "too few samples to tell" in message
        assert (
            "revision r2 has no adapter law: revision 1 finishes the admitted requests for it"
            in message
        )
        assert message.endswith("set worker.revision: r2 in the configuration")
        await only_left(admin, "r2")
        answer = await client.complete([1, 2, 3], max_tokens=2, timeout_s=WAIT_S)
        assert answer.token_ids == (0, 1)
    found = await admin.get_rollout()
    assert (found.phase, found.share, found.stable_revision) == (NONE, 0.0, "r2")
    assert found.last == "revision 'r2' was promoted, after '1'"
    # The statistics of both fleets stay visible.
    assert found.canary.num_ended + found.stable.num_ended == 24


async def test_an_abort_leaves_only_the_stable_fleet(cell):
    coordinator, admin = cell
    await admin.start_rollout("r2", share=1.0)
    assert "all new requests go to revision 1" in await admin.abort_rollout(5.0)
    await only_left(admin, "1")
    async with BatonClient(coordinator.address) as client:
        await client.complete([1, 2, 3], max_tokens=2, timeout_s=WAIT_S)
    found = await admin.get_rollout()
    assert found.last == "revision 'r2' was aborted: requested by an operator"


async def test_a_watch_reports_each_phase(cell):
    _, admin = cell
    async with asyncio.timeout(WAIT_S), contextlib.aclosing(admin.watch(0.1)) as events:
        first = (await anext(events)).rollout
        assert (first.phase, first.stable_revision) == (NONE, "1")
        await admin.start_rollout("r2", share=0.5)
        running = await until(events, lambda found: found.phase == RUNNING)
        assert (running.canary.name, running.share) == ("r2", 0.5)
        await admin.set_rollout_share(0.25)
        await until(events, lambda found: found.share == 0.25)
        await admin.promote_rollout()
        ended = await until(events, lambda found: found.phase == NONE)
        assert ended.stable_revision == "r2"
        # The old fleet's workers leave.
        await until(
            events, lambda found: not found.others and not found.stable.pools[0].num_serving
        )


async def until(events, done):
    """Waits for the first rollout status that `done` accepts, and returns it."""
    async for event in events:
        if done(event.rollout):
            return event.rollout
    raise AssertionError("the coordinator stopped")


@pytest.mark.parametrize("was_there", [True, False])
async def test_a_canarys_limits_do_not_apply_while_the_stable_revision_has_no_worker(
    coordinator_config, say_hello, was_there
):
    """A prompt that only the stable revision can compute waits for that revision's next workers."""

    async def attach(revision, number, max_model_len):
        found = []
        for name, role in (("p", PREFILL), ("d", DECODE)):
            hello = say_hello(f"{name}{number}", role, revision=revision)
            hello.model.max_model_len = max_model_len
            found.append(Leaves(coordinator.address, hello))
            await found[-1].connect()
        workers.extend(found)
        return found

    async with Coordinator(coordinator_config()) as coordinator:
        workers: list[Leaves] = []
        try:
            async with (
                BatonClient(coordinator.address) as client,
                AdminClient(coordinator.address) as admin,
            ):
                if was_there:
                    stable = await attach("", 1, 1024)
                    await admin.list_pools()
                    for worker in stable:
                        await admin.drain_worker(worker.hello.worker_id)
                await attach("r2", 2, 64)
                await only_left(admin, "r2")
                asking = asyncio.create_task(
                    client.complete([1] * 100, max_tokens=2, timeout_s=WAIT_S)
                )
                while not asking.done() and not await admin.list_requests():
                    await asyncio.sleep(0.02)
                await attach("", 3, 1024)
                assert (await asking).token_ids == (0, 1)
        finally:
            for worker in workers:
                await worker.close()


async def test_wrong_calls_name_the_field(cell):
    _, admin = cell
    for call in (admin.promote_rollout, admin.abort_rollout, lambda: admin.set_rollout_share(0.1)):
        with pytest.raises(errors.FailedPreconditionError, match="no rollout runs"):
            await call()
    for fields, field in (
        ({"revision": "a b", "share": 0.1}, "revision"),
        ({"revision": "1", "share": 0.1}, "revision"),
        ({"revision": "r2", "share": 1.1}, "share"),
    ):
        with pytest.raises(errors.InvalidArgumentError) as caught:
            await admin.start_rollout(**fields)
        assert caught.value.field == field
    with pytest.raises(errors.FailedPreconditionError, match="of revision 'r7' is attached"):
        await admin.start_rollout("r7", share=0.1)
    with pytest.raises(errors.FailedPreconditionError, match="starts no workers"):
        await admin.start_rollout("r2", share=0.1, engine_args={"max_num_seqs": 4})
    await admin.start_rollout("r2", share=0.1)
    with pytest.raises(errors.FailedPreconditionError, match="a rollout of 'r2' runs"):
        await admin.start_rollout("r3", share=0.1)
    with pytest.raises(errors.InvalidArgumentError) as caught:
        await admin.promote_rollout(1e9)
    assert caught.value.field == "drain_timeout"


async def test_engine_arguments_must_be_json(cell):
    coordinator, _ = cell
    request = admin_pb2.StartRolloutRequest(
        revision="r2", share=0.1, engine_args={"max_num_seqs": "{"}
    )
    async with rpc.channel(coordinator.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin_pb2_grpc.AdminStub(channel).StartRollout(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "engine_args[\"max_num_seqs\"] is '{'; must be JSON"
