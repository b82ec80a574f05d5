"""The Admin service's scaling calls over a real server, with a launcher of scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time

import grpc
import pytest

from baton.client import AdminClient, BatonClient, errors
from baton.coordinator.core.core import Core
from baton.coordinator.launchers.launch_supervisor import LaunchSupervisor
from baton.coordinator.launchers.launcher import WorkerExit
from baton.coordinator.server import admin_scaling
from baton.coordinator.server.metrics import registry
from baton.coordinator.server.server import Coordinator
from baton.coordinator.server.stall import StallGuard
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.runtime.config import BatonConfig, PoolLimitsConfig, ScalingSection, parse
from baton.runtime.network import rpc
from baton.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, common_pb2
from tests.coordinator.scripted_worker import WAIT_S, ScriptedWorker, attached

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
ROLES = {"prefill": PREFILL, "decode": DECODE}


class Obedient(ScriptedWorker):
    """A worker that carries out drain and role commands."""

    async def _serve(self, message):
        kind = message.WhichOneof("message")
        if kind == "drain":
            await self.change(state=cluster_pb2.WORKER_STATE_DRAINING)
        elif kind == "release":
            await self.leave()
        elif kind == "set_role":
            role = message.set_role.role
            await self.change(state=cluster_pb2.WORKER_STATE_SERVING, role=role)
        else:
            await super()._serve(message)

    async def change(self, **fields):
        await self.say(state_changed=cluster_pb2.WorkerStateChanged(**fields))


class ScriptedLauncher:
    """Runs workers in this process; workers in `broken` cannot be started."""

    def __init__(self, address, say_hello, on_exit):
        self._address, self._say_hello, self.on_exit = address, say_hello, on_exit
        self.workers, self.ended = {}, []
        self.broken = ""

    async def start(self, worker_id, role, revision=None):
        if role == self.broken:
            raise OSError("no room for it")
        hello = self._say_hello(worker_id, ROLES[role], revision=revision.name)
        worker = Obedient(self._address, hello)
        self.workers[worker_id] = worker
        await worker.connect()

    async def end(self, worker_id):
        self.ended.append(worker_id)
        worker = self.workers.pop(worker_id, None)
        if worker is not None:
            await worker.close()

    async def stop(self):
        for worker_id in list(self.workers):
            await self.end(worker_id)


@contextlib.asynccontextmanager
async def launching(config, say_hello, sizes):
    """A coordinator with a launcher, the launcher, and an admin client."""
    async with Coordinator(config, launched=True) as coordinator:
        shell = coordinator.shell
        launch_supervisor = shell.launch_supervisor = LaunchSupervisor(shell.post)
        launcher = ScriptedLauncher(coordinator.address, say_hello, launch_supervisor.on_exit)
        launch_supervisor.use(launcher)
        shell.post(ev.LauncherReady(dict.fromkeys(Pool, sizes)))
        async with AdminClient(coordinator.address) as admin:
            await until(admin, lambda event: len(event.workers) == 2 * sizes)
            yield coordinator, launcher, admin
        shell.post(ev.AdmissionClosed())
        await launch_supervisor.close()
        assert not launcher.workers
        shell.core.check_integrity()


@pytest.fixture
async def cell(coordinator_config, say_hello):
    """One worker in each pool."""
    async with launching(coordinator_config(), say_hello, 1) as made:
        yield made


async def until(admin, done):
    """Returns the first event that satisfies a condition."""
    async with asyncio.timeout(WAIT_S), contextlib.aclosing(admin.watch(0.1)) as events:
        async for event in events:
            if done(event):
                return event
    raise AssertionError("the coordinator stopped")


def pool(event, role):
    return next(one for one in event.pools.pools if one.role == role)


def ids(event, role):
    serves = cluster_pb2.WORKER_STATE_SERVING
    return {one.worker_id for one in event.workers if (one.role, one.state) == (role, serves)}


async def test_only_a_pool_that_is_sized_by_its_load_has_a_ceiling(cell):
    """A pool of a fixed size that equals max_workers would be at its ceiling for ever."""
    coordinator, _, admin = cell

    def ceilings():
        found = registry(coordinator.shell.core, BatonConfig())
        values = {
            one.value: found.get_sample_value("baton_workers_max", {"pool": one.value})
            for one in Pool
        }
        return {name for name, value in values.items() if value is not None}

    assert ceilings() == set()
    await admin.set_autoscale(enabled=True)
    assert ceilings() == {"prefill", "decode"}
    await admin.scale_pool(DECODE, 2)
    assert ceilings() == {"prefill"}
    await admin.set_autoscale(enabled=False)
    assert ceilings() == set()


def test_a_pool_whose_limits_leave_it_one_size_has_no_ceiling():
    """It would be at its ceiling for ever, too."""
    scaling = {"autoscale": True, "prefill": {"min_workers": 2, "max_workers": 2}}
    config = parse({"elastic": False, "scaling": scaling}, "test")
    core = Core(CoreConfig.of(config))
    core.scaler.begin(dict.fromkeys(Pool, 2))
    found = registry(core, config)
    assert found.get_sample_value("baton_workers_max", {"pool": "prefill"}) is None
    assert found.get_sample_value("baton_workers_max", {"pool": "decode"}) is not None


async def test_scale_grows_and_shrinks_and_says_who_wins(cell):
    _, launcher, admin = cell
    answer = await admin.scale_pool(DECODE, 2)
    assert answer.pool.desired == answer.pool.size_by_hand == 2
    assert answer.message.startswith("the target size of the decode pool is 2 workers")
    await until(admin, lambda event: ids(event, DECODE) == {"decode-0", "decode-1"})
    assert await admin.set_autoscale(enabled=True)
    answer = await admin.scale_pool(DECODE, 1)
    assert "autoscaling keeps this size" in answer.message
    event = await until(admin, lambda event: len(event.workers) == 2)
    assert event.pools.autoscale
    assert pool(event, DECODE).size_by_hand == 1
    assert [one.sizes_itself for one in event.pools.pools] == [True, False]
    async with asyncio.timeout(WAIT_S):
        while len(launcher.ended) < 1:
            await asyncio.sleep(0.01)
    with pytest.raises(errors.FailedPreconditionError, match="workers is 99"):
        await admin.scale_pool(DECODE, 99)
    with pytest.raises(errors.InvalidArgumentError) as caught:
        await admin.scale_pool(common_pb2.ROLE_UNSPECIFIED, 1)
    assert caught.value.field == "role"
    await admin.set_autoscale(enabled=True)
    event = await until(admin, lambda event: not pool(event, DECODE).HasField("size_by_hand"))


async def test_decisions_have_numbers_and_reasons(cell):
    _, _, admin = cell
    await admin.scale_pool(PREFILL, 2)
    await until(admin, lambda event: len(ids(event, PREFILL)) == 2)
    found = await admin.list_decisions(PREFILL)
    assert {one.role for one in found} == {PREFILL}
    grown = next(one for one in found if one.to_workers == 2)
    assert "2 wanted" in grown.reason
    assert grown.from_workers == 1
    assert grown.inputs["serving"] == 1
    assert found[0].at.ToNanoseconds() >= found[-1].since.ToNanoseconds() > 0
    both = await admin.list_decisions(limit=1)
    assert [one.role for one in both] == [PREFILL, DECODE]


async def test_targets_change_by_field_and_lane(cell):
    _, _, admin = cell
    before = {one.lane: one for one in await admin.set_targets()}
    assert before[common_pb2.LANE_INTERACTIVE].ttft_ms == 500
    asked = admin_pb2.LaneTargets(lane=common_pb2.LANE_INTERACTIVE, ttft_ms=300)
    batch = admin_pb2.LaneTargets(lane=common_pb2.LANE_BATCH, itl_ms=200, percentile=90)
    after = {one.lane: one for one in await admin.set_targets([asked, batch])}
    interactive = after[common_pb2.LANE_INTERACTIVE]
    assert (interactive.ttft_ms, interactive.itl_ms, interactive.percentile) == (300, 50, 95)
    gap = interactive.longest_gap_ms, interactive.longest_gap_reason
    assert gap == (60, "long gaps are for elastic cells with steps.scheduler baton")
    found = after[common_pb2.LANE_BATCH]
    assert (found.ttft_ms, found.itl_ms, found.percentile) == (0, 200, 90)
    assert not found.longest_gap_ms
    listed = await admin.list_pools()
    assert list(listed.targets) == [interactive, found]
    # Without a base there is no slope.
    grows = admin_pb2.LaneTargets(lane=1, ttft_ms_per_1k_tokens=40)
    (interactive, _) = await admin.set_targets([grows])
    assert (interactive.ttft_ms, interactive.ttft_ms_per_1k_tokens) == (300, 40)
    (interactive, _) = await admin.set_targets([admin_pb2.LaneTargets(lane=1, ttft_ms=0)])
    assert (interactive.ttft_ms, interactive.ttft_ms_per_1k_tokens) == (0, 0)
    for wrong, field in (
        (admin_pb2.LaneTargets(lane=7), "targets[0].lane"),
        (admin_pb2.LaneTargets(lane=1, percentile=100), "targets[0].percentile"),
        (admin_pb2.LaneTargets(lane=1, ttft_ms=2**31), "targets[0].ttft_ms"),
        (grows, "targets[0].ttft_ms_per_1k_tokens"),
        (
            admin_pb2.LaneTargets(lane=1, ttft_ms=1, ttft_ms_per_1k_tokens=2**31),
            "targets[0].ttft_ms_per_1k_tokens",
        ),
    ):
        with pytest.raises(errors.InvalidArgumentError) as caught:
            await admin.set_targets([wrong])
        assert caught.value.field == field


async def test_drain_and_flip_through_the_calls(cell):
    _, launcher, admin = cell
    await admin.scale_pool(PREFILL, 2)
    await until(admin, lambda event: len(ids(event, PREFILL)) == 2)
    assert "serves decode once" in await admin.flip_worker("prefill-1", DECODE)
    await until(admin, lambda event: ids(event, DECODE) == {"decode-0", "prefill-1"})
    assert "already" in await admin.flip_worker("prefill-1", DECODE)
    assert "to keep one worker less, use `baton scale`" in await admin.drain_worker("decode-0", 5.0)
    event = await until(admin, lambda event: ids(event, DECODE) == {"decode-1", "prefill-1"})
    assert pool(event, DECODE).desired == 2
    assert launcher.ended == ["decode-0"]
    with pytest.raises(errors.FailedPreconditionError, match="the only serving prefill worker"):
        await admin.flip_worker("prefill-0", DECODE)
    for call in (admin.drain_worker("absent"), admin.flip_worker("absent", DECODE)):
        with pytest.raises(errors.NotFoundError, match="attached: decode-1, prefill-0"):
            await call


async def test_what_cannot_be_started_is_told_with_its_reason(cell):
    _, launcher, admin = cell
    launcher.broken = "decode"
    await admin.scale_pool(DECODE, 2)
    event = await until(admin, lambda event: pool(event, DECODE).problem)
    why = "worker decode-1 could not be started: no room for it"
    assert pool(event, DECODE).problem == why
    launcher.broken = ""
    event = await until(admin, lambda event: len(ids(event, DECODE)) == 2)
    assert ids(event, DECODE) == {"decode-0", "decode-2"}


async def test_a_process_that_dies_is_forgotten_and_replaced(cell):
    _, launcher, admin = cell
    died = WorkerExit("prefill-0", -9, "")
    assert str(died) == "worker prefill-0 was killed by SIGKILL"
    launcher.on_exit(died)
    event = await until(admin, lambda event: ids(event, PREFILL) - {"prefill-0"})
    assert ids(event, PREFILL) == {"prefill-1"}
    assert launcher.ended == ["prefill-0"]


async def test_a_request_that_finds_no_workers_has_them_started(coordinator_config, say_hello):
    limits = PoolLimitsConfig(min_workers=0)
    scaling = ScalingSection(autoscale=True, prefill=limits, decode=limits, idle_s=600)
    config = coordinator_config().model_copy(update={"scaling": scaling})
    async with launching(config, say_hello, 0) as (coordinator, launcher, admin):
        # Waits for the first decision, which saw an empty cell.
        await until(admin, lambda event: pool(event, DECODE).reason)
        async with BatonClient(coordinator.address) as client:
            await client.wait_ready(WAIT_S)
            done = await client.complete("the fox", max_tokens=4, timeout_s=WAIT_S)
        assert len(done.token_ids) == 4
        assert sorted(launcher.workers) == ["decode-0", "prefill-0"]


async def test_watching_is_told_of_changes_only_and_by_so_many_at_most(cell):
    _, _, admin = cell
    async with contextlib.aclosing(admin.watch(0.1)) as events:
        first = await anext(events)
        assert {one.role for one in first.decisions} == {PREFILL, DECODE}
        await admin.scale_pool(PREFILL, 2)
        # There is no event while nothing changes.
        assert pool(await anext(events), PREFILL).desired == 2
    async with contextlib.AsyncExitStack() as stack:
        watching = [
            await stack.enter_async_context(contextlib.aclosing(admin.watch())) for _ in range(64)
        ]
        await asyncio.gather(*(anext(one) for one in watching))
        with pytest.raises(errors.ResourceExhaustedError) as caught:
            await anext(admin.watch())
        assert caught.value.reason == "TOO_MANY_WATCHERS"
    with pytest.raises(errors.InvalidArgumentError):
        await anext(admin.watch(0.01))


async def test_who_watches_is_told_of_every_decision_however_seldom_it_looks(cell):
    _, _, admin = cell

    async def decided(number):
        await admin.scale_pool(PREFILL, number)
        async with asyncio.timeout(WAIT_S):
            while (await admin.list_decisions(PREFILL, limit=1))[0].to_workers != number:
                await asyncio.sleep(0.01)

    sizes = []
    async with contextlib.aclosing(admin.watch(2.0)) as events:
        await anext(events)
        for number in (2, 3, 1):
            await decided(number)
        # Decisions come in their order; other reasons may cause further decisions on a size.
        async with asyncio.timeout(WAIT_S):
            while [size for size, _ in itertools.groupby(sizes)][-3:] != [2, 3, 1]:
                told = (await anext(events)).decisions
                sizes += [one.to_workers for one in told if one.role == PREFILL]


async def test_many_who_watch_cost_hardly_more_than_one(cell, monkeypatch):
    _, _, admin = cell
    looked, state = [], admin_scaling._comparable_state
    monkeypatch.setattr(
        admin_scaling, "_comparable_state", lambda event: looked.append(1) or state(event)
    )
    async with contextlib.AsyncExitStack() as stack:
        watching = [
            await stack.enter_async_context(contextlib.aclosing(admin.watch(0.1)))
            for _ in range(32)
        ]
        firsts = await asyncio.gather(*(anext(one) for one in watching))
        assert all(len(first.workers) == 2 and len(first.decisions) == 2 for first in firsts)
        looked.clear()
        begun_at = time.monotonic()
        async with asyncio.timeout(WAIT_S):
            while len(looked) <= 10:
                await asyncio.sleep(0.01)
        # Each watcher looks 10 times per second; the shared snapshot is taken at most 20 times.
        assert len(looked) < 32 * (time.monotonic() - begun_at)


async def test_who_watches_and_does_not_read_takes_nobodys_place(
    coordinator, say_hello, monkeypatch
):
    defaults = StallGuard.__init__.__defaults__
    monkeypatch.setattr(StallGuard.__init__, "__defaults__", (0.2, *defaults[1:]))
    monkeypatch.setattr(admin_scaling, "_MAX_WATCHERS", 1)
    # Large events, so that few events fill the connection's buffers.
    hello = say_hello("d", DECODE, labels={"note": "x" * 500_000})
    request = admin_pb2.WatchRequest()
    request.min_interval.FromMilliseconds(100)
    async with (
        attached(coordinator.address, hello) as (worker,),
        rpc.channel(coordinator.address) as channel,
        AdminClient(coordinator.address) as admin,
        asyncio.timeout(4 * WAIT_S),
    ):
        unread = aiter(admin_pb2_grpc.AdminStub(channel).Watch(request))
        await anext(unread)
        for number in itertools.count(1):
            try:
                async with contextlib.aclosing(admin.watch(0.1)) as events:
                    await anext(events)
                    break
            except errors.ResourceExhaustedError:
                await worker.load(num_running=number)
                await asyncio.sleep(0.05)
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in unread:
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_without_a_launcher_sizes_are_refused_and_workers_drain_all_the_same(
    coordinator, say_hello
):
    worker = Obedient(coordinator.address, say_hello("d", DECODE))
    await worker.connect()
    async with AdminClient(coordinator.address) as admin:
        for call in (
            admin.scale_pool(DECODE, 1),
            admin.set_autoscale(enabled=True),
            admin.list_decisions(),
        ):
            with pytest.raises(errors.FailedPreconditionError, match="starts no workers"):
                await call
        await admin.drain_worker("d")
        await until(admin, lambda event: not event.workers)
    await worker.close()


async def test_without_a_launcher_targets_change_the_steps_all_the_same(coordinator, say_hello):
    async with (
        attached(coordinator.address, say_hello("d", DECODE)) as (worker,),
        AdminClient(coordinator.address) as admin,
    ):
        before = await admin.set_targets()
        assert [one.itl_ms for one in before if one.lane == common_pb2.LANE_INTERACTIVE] == [50]
        asked = admin_pb2.LaneTargets(lane=common_pb2.LANE_INTERACTIVE, itl_ms=20)
        (after,) = [one for one in await admin.set_targets([asked]) if one.lane == asked.lane]
        assert after.itl_ms == 20
        assert (await worker.command("step_targets")).itl.ToMilliseconds() == 20


async def test_a_rollout_through_the_launcher(cell):
    coordinator, launcher, admin = cell

    async def revisions(*wanted):
        async with asyncio.timeout(2 * WAIT_S):
            while sorted(one.revision for one in await admin.list_workers()) != sorted(wanted):
                await asyncio.sleep(0.02)

    message = await admin.start_rollout(
        "r2", share=1.0, model="/models/new", engine_args={"max_num_seqs": 8}, num_decode=2
    )
    assert "1 prefill and 2 decode workers are being started" in message
    await revisions("1", "1", "r2", "r2", "r2")
    found = await admin.get_rollout()
    assert (found.canary.model, dict(found.canary.engine_args)) == (
        "/models/new",
        {"max_num_seqs": "8"},
    )
    async with BatonClient(coordinator.address) as client:
        assert (await client.complete([1, 2, 3], max_tokens=3)).token_ids == (0, 1, 2)
        message = await admin.promote_rollout()
        assert 'model: /models/new, engine_args: {"max_num_seqs": 8}' in message
        # The pools keep their sizes.
        await revisions("r2", "r2")
        await admin.start_rollout("r3", share=1.0, engine_args={"enforce_eager": True})
        await revisions("r2", "r2", "r3", "r3")
        # The next rollout is based on the promoted revision.
        canary = (await admin.get_rollout()).canary
        assert canary.model == "/models/new"
        assert set(canary.engine_args) == {"max_num_seqs", "enforce_eager"}
        assert (await client.complete([1, 2, 3], max_tokens=3)).token_ids == (0, 1, 2)
        await admin.abort_rollout()
        await revisions("r2", "r2")
    async with asyncio.timeout(WAIT_S):
        while len(launcher.workers) > 2:
            await asyncio.sleep(0.02)
