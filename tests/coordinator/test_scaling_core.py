"""Scaling decisions in the core: workers are started once, replaced and ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.coordinator.scaling.launches import Launches
from baton.coordinator.server.metrics import CoreCollector
from baton.coordinator.state import events as ev
from baton.coordinator.state.fleets import Fleets
from baton.coordinator.state.pools import ROLE_OF, Pool
from baton.coordinator.state.scaling_config import PoolLimits, Targets
from baton.coordinator.state.workers import WorkerRegistry
from baton.coordinator.telemetry.stats import CoreStats
from baton.runtime import errors
from baton.runtime.config import parse
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.launched_world import Launched

PREFILL, DECODE = Pool.PREFILL, Pool.DECODE


@pytest.fixture
def launched(new_world):
    """Factory of a world whose workers have served for a while."""

    def make(prefill=1, decode=1, **options) -> Launched:
        made = Launched(new_world, prefill, decode, **options)
        made.come_up()
        made.wait(11)
        return made

    return make


# ---- Starting.


def test_pools_begin_with_what_is_configured_and_each_start_counts_once(new_world):
    made = Launched(new_world, 2, 1)
    assert made.started == ["prefill-0", "prefill-1", "decode-0"]
    made.wait(20)
    assert len(made.started) == 3
    assert made.core.scaler.launches.num_starting(PREFILL) == 2
    made.come_up()
    made.wait(20)
    assert len(made.started) == 3
    assert made.core.scaler.launches.num_starting(PREFILL) == 0
    assert made.core.can_serve


def test_a_start_that_hangs_is_ended_and_told_of_and_another_follows(new_world):
    made = Launched(new_world)
    made.wait(29)
    assert made.ended == []
    made.wait(7)
    assert sorted(made.ended) == ["decode-0", "prefill-0"]
    assert made.started[2:] == ["prefill-1", "decode-1"]
    told = "worker prefill-0 did not come up within 30 s"
    assert made.core.scaler.launches.problem(PREFILL) == told
    assert told in made.reason(PREFILL)
    assert made.core.stats.num_failed_starts == 2


def test_a_start_that_fails_is_told_and_tried_again_later_and_later(launched):
    made = launched()
    made.world.handle(ev.ScaleRequested(PREFILL, 2))
    made.wait(1)
    waits = []
    for _ in range(8):
        worker_id, failed_at = made.started[-1], made.world.now
        made.world.handle(ev.WorkerExited(worker_id, "exited with code 1", "no such weights"))
        while made.started[-1] == worker_id:
            made.wait(1)
        waits.append(made.world.now - failed_at)
        assert f"worker {worker_id} no such weights" in made.core.scaler.launches.problem(PREFILL)
        assert "no such weights" in made.reason(PREFILL)
    assert waits == sorted(waits)
    assert waits[0] <= 2
    assert 60 <= waits[-1] <= 66
    assert len(set(made.started)) == len(made.started)
    assert set(made.started[2:]) <= set(made.ended) | {made.started[-1]}
    made.come_up()
    made.wait(20)
    assert made.core.scaler.launches.problem(PREFILL) == ""
    assert made.core.stats.num_failed_starts == 8


def test_the_wait_between_starts_that_fail_for_days_stays_the_longest():
    orders = list[ev.Effect]()
    launches = Launches(WorkerRegistry("m", Fleets("1")), CoreStats(), orders.append)
    now, wait_s = 0.0, 0.0
    for _ in range(1100):
        launches.start(PREFILL, 1, now)
        worker_id = orders[-1].worker_id
        assert launches.exited(ev.WorkerExited(worker_id, "exited with code 1"), now)
        assert not launches.exited(ev.WorkerExited(worker_id, "was ended", gone=True), now)
        assert now + wait_s <= launches.not_before(PREFILL) <= now + 60
        wait_s, now = launches.not_before(PREFILL) - now, launches.not_before(PREFILL)
    assert wait_s == 60
    assert launches.worker_ids == []


def test_an_unwanted_start_is_not_announced_as_tried_again(launched):
    made = launched()
    made.world.handle(ev.ScaleRequested(PREFILL, 2))
    made.wait(1)
    for _ in range(4):
        worker_id = made.started[-1]
        made.world.handle(ev.WorkerExited(worker_id, "exited with code 1", "no such weights"))
        made.wait(1)
        while made.started[-1] == worker_id:
            assert "no such weights; tried again in " in made.reason(PREFILL)
            made.wait(1)
    made.wait(1)
    assert made.reason(PREFILL).endswith("no such weights; tried again")
    made.world.handle(ev.ScaleRequested(PREFILL, 1))
    made.wait(1)
    assert made.reason(PREFILL).endswith("no such weights")


@pytest.mark.parametrize("who", ["the launcher", "the scaler"])
def test_workers_that_never_found_room_do_not_limit_later_starts(launched, who):
    """Nodes may come later than a worker is given up, and Ray adds one per waiting worker."""
    made = launched()
    made.world.handle(ev.ScaleRequested(DECODE, 4))
    made.wait(1)
    waiting, room = made.started[-3:], "waits for room: no node has GPU 1"
    for worker_id in waiting:
        made.world.handle(ev.WorkerWaits(worker_id, room))
    if who == "the scaler":
        made.wait(35)
    else:
        for worker_id in waiting:
            made.world.handle(ev.WorkerExited(worker_id, f"was not placed: {room}"))
        made.wait(1)
    assert set(made.ended) == set(waiting)
    assert len(made.started) == 2 + 2 * 3
    assert made.core.stats.num_failed_starts == 3
    problem = made.core.scaler.launches.problem(DECODE)
    assert problem.startswith(f"worker {waiting[-1]} ")
    assert problem.endswith(room)
    made.come_up()
    made.wait(20)
    assert made.core.scaler.launches.problem(DECODE) == ""


def test_workers_that_wait_for_room_are_told_of_until_they_have_it(launched):
    made = launched()
    made.world.handle(ev.ScaleRequested(DECODE, 3))
    made.wait(1)
    waiting = made.started[-2:]
    for worker_id in waiting:
        made.world.handle(ev.WorkerWaits(worker_id, "waits for room: no node has GPU 2"))
    told = f"worker {waiting[0]} waits for room: no node has GPU 2; 1 more wait"
    assert made.core.scaler.launches.waiting(DECODE) == told
    assert made.core.scaler.launches.waiting(PREFILL) == ""
    made.wait(1)
    assert told in made.reason(DECODE)
    # Waiting does not count as a failed start, so no other start follows.
    assert made.core.scaler.launches.problem(DECODE) == ""
    assert made.started[-2:] == waiting

    made.world.handle(ev.WorkerWaits(waiting[0], ""))
    assert made.core.scaler.launches.waiting(DECODE).startswith(f"worker {waiting[1]} waits")
    made.come_up()
    made.wait(1)
    assert made.core.scaler.launches.waiting(DECODE) == ""
    assert "waits" not in made.reason(DECODE)


def test_a_worker_that_dies_is_replaced_at_once_also_without_autoscaling(launched):
    made = launched()
    made.world.handle(ev.WorkerExited("decode-0", "was killed by SIGKILL"))
    assert made.ended == ["decode-0"]
    made.world.after(0.5)
    assert made.started[-1] == "decode-1"
    made.come_up()
    assert made.ids(DECODE) == {"decode-1"}


def test_a_worker_that_goes_silent_is_ended_and_replaced(launched):
    made = launched(prefill=2)
    made.world.wait(12, silent=["prefill-0"])
    assert made.ended == ["prefill-0"]
    assert made.started[-1] == "prefill-2"


def test_one_that_dies_again_and_again_is_not_started_in_a_loop(launched):
    made = launched()
    for _ in range(5):
        made.world.handle(ev.WorkerExited(made.started[-1], "was killed by SIGSEGV"))
        made.wait(1)
        made.come_up()
    assert len(made.started) <= 6


def test_a_worker_started_elsewhere_is_never_drained(launched):
    made = launched()
    made.world.attach("guest", common_pb2.ROLE_DECODE)
    made.wait(10)

    # In a pool of configured size, the guest does not count.
    assert (len(made.started), made.ids(DECODE)) == (2, {"decode-0", "guest"})
    made.world.handle(ev.ScaleRequested(DECODE, 3))
    made.wait(10)
    assert len(made.started) == 3
    made.come_up()
    made.world.handle(ev.ScaleRequested(DECODE, 1))
    made.wait(10)
    assert made.ids(DECODE) == {"guest"}


@pytest.mark.parametrize("elastic", [False, True])
def test_spare_workers_are_drained_beside_workers_started_elsewhere(new_world, elastic):
    """The pool with the most spare workers has none that Baton may drain."""
    limits = {pool.value: PoolLimits(1, 16) for pool in (PREFILL, DECODE)}
    world = {"elastic": elastic}
    made = Launched(new_world, 3, 1, autoscale=True, world=world, limits=limits)
    made.come_up()
    guests = {f"guest-{n}" for n in range(4)}
    for name in guests:
        made.world.attach(name, common_pb2.ROLE_DECODE, revision="1")
    made.wait(600)
    assert len(made.ids(PREFILL)) == 1
    assert made.ids(DECODE) == guests
    # No decision names a size that the guests do not allow.
    for one in made.core.scaler.decisions[DECODE]:
        assert one.decision.target >= len(guests) or one.decision.current < len(guests)
    assert made.core.scaler.decisions[DECODE][-1].decision.target == len(guests)


def test_a_worker_that_another_incarnation_replaces_is_not_ended(launched):
    made = launched()
    made.world.attach("prefill-0", common_pb2.ROLE_PREFILL, incarnation=2)
    made.wait(10)
    assert made.ended == []
    assert len(made.started) == 2


def test_a_worker_of_the_coordinator_before_is_not_taken_for_its_namesake(new_world, say_hello):
    """After a kill and restart of `baton up`, draining old workers attach to the new one."""
    made = Launched(new_world)
    attached = say_hello(
        "decode-0",
        common_pb2.ROLE_DECODE,
        incarnation := 7,
        generation=77,
        state=cluster_pb2.WORKER_STATE_DRAINING,
    )
    made.world.handle(ev.WorkerAttached(attached, returns=True))
    assert made.core.scaler.launches.num_starting(DECODE) == 1
    stopped = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_STOPPED)
    made.world.handle(ev.WorkerChanged(("decode-0", incarnation), stopped))
    made.wait(6)
    assert made.ended == []
    assert made.started == ["prefill-0", "decode-0"]
    made.come_up()
    assert made.core.can_serve
    assert made.core.stats.cold_starts == {"prefill": 1, "decode": 1}


def test_a_namesake_that_had_changed_its_role_moves_no_start_into_its_pool(new_world, say_hello):
    """The earlier coordinator flipped the old worker, which drains in the other pool."""
    made = Launched(new_world)
    attached = say_hello(
        "decode-0",
        common_pb2.ROLE_PREFILL,
        7,
        generation=77,
        state=cluster_pb2.WORKER_STATE_DRAINING,
    )
    made.world.handle(ev.WorkerAttached(attached, returns=True))
    made.wait(6)
    assert made.ended == []
    assert made.started == ["prefill-0", "decode-0"]


def test_a_start_that_fails_does_not_take_its_namesake_with_it(new_world, say_hello):
    made = Launched(new_world)
    attached = say_hello("decode-0", common_pb2.ROLE_DECODE, 7, generation=77)
    made.world.handle(ev.WorkerAttached(attached, returns=True))
    made.world.handle(ev.WorkerExited("decode-0", "exited with code 1"))
    assert made.ended == ["decode-0"]
    assert made.ids(DECODE) == {"decode-0"}


def test_a_process_that_was_replaced_does_not_take_its_successor_with_it(launched):
    """An operator starts a worker by hand, with the ID of one that the coordinator started."""
    made = launched()
    made.world.attach("decode-0", common_pb2.ROLE_DECODE, incarnation=2)
    made.world.handle(ev.WorkerExited("decode-0", "exited with code 1: fenced"))
    made.world.handle(ev.WorkerExited("decode-0", "was ended", gone=True))
    assert made.core.workers.by_id("decode-0").key == ("decode-0", 2)
    assert made.ids(DECODE) == {"decode-0"}
    assert not made.core.scaler.launches.has("decode-0")


def test_a_worker_is_not_drained_because_its_namesake_ends(launched):
    made = launched()
    made.world.handle(ev.WorkerExited("decode-0", "exited with code 1"))
    assert made.ended == ["decode-0"]
    made.world.attach("decode-0", common_pb2.ROLE_DECODE, incarnation=2)
    assert made.ids(DECODE) == {"decode-0"}
    made.world.handle(ev.WorkerExited("decode-0", "was ended", gone=True))
    assert made.ids(DECODE) == {"decode-0"}


def test_cold_starts_are_counted_and_timed(new_world):
    made = Launched(new_world)
    made.wait(4)
    made.come_up()
    stats = made.core.stats
    assert stats.cold_starts == {"prefill": 1, "decode": 1}
    assert (stats.cold_start_s["weights"].total, stats.cold_start_s["process"].total) == (4.0, 0.2)
    assert dict(stats.cold_start_s["weights"].buckets())["2.5"] == 2
    assert stats.cold_start_s["total"].total == pytest.approx(8.0)


# ---- Sizes set by an operator.


def test_a_size_by_hand_grows_and_shrinks_the_pool(launched):
    made = launched()
    made.world.handle(ev.ScaleRequested(DECODE, 3))
    made.wait(1)
    assert made.started[2:] == ["decode-1", "decode-2"]
    made.come_up()
    made.world.handle(ev.ScaleRequested(DECODE, 1))
    made.wait(1)
    assert len(made.ids(DECODE)) == 1
    made.wait(2)
    assert len(made.ended) == 2
    made.wait(20)
    assert len(made.started) == 4
    assert made.core.scaler.desired(DECODE) == 1


def test_a_size_outside_the_limits_is_refused_with_them(launched):
    made = launched()
    refused = made.core.scaler.scale_error(DECODE, 5)
    assert isinstance(refused, errors.FailedPrecondition)
    assert "workers is 5; scaling.decode allows 0 to 4" in str(refused)
    assert made.core.scaler.scale_error(DECODE, 4) is None


def test_a_size_by_hand_wins_over_autoscaling_until_that_is_switched_on_again(launched):
    made = launched(autoscale=True)
    made.world.handle(ev.ScaleRequested(DECODE, 3))
    made.wait(1)
    made.come_up()
    made.wait(100)
    assert len(made.ids(DECODE)) == 3
    assert "held at 3, set by hand, until `baton autoscale on`" in made.reason(DECODE)
    made.world.handle(ev.AutoscaleRequested(True))
    made.wait(150)
    assert len(made.ids(DECODE)) == 1
    assert "held" not in made.reason(DECODE)


def test_autoscaling_off_keeps_the_sizes(launched):
    made = launched(3, 2, autoscale=True)
    made.world.handle(ev.AutoscaleRequested(False))
    made.wait(200)
    assert (len(made.ids(PREFILL)), len(made.ids(DECODE))) == (3, 2)
    assert "autoscaling is off: 3 wanted" in made.reason(PREFILL)


def test_a_drained_worker_is_replaced_and_its_process_ended(launched):
    made = launched()
    made.world.handle(ev.DrainRequested("decode-0", 5.0, "requested by an operator"))
    made.wait(1)
    assert made.started[-1] == "decode-1"
    assert made.ended == ["decode-0"]
    assert made.core.stats.num_failed_starts == 0


def test_a_worker_that_does_not_leave_in_time_is_out(launched):
    made = launched(decode=2)
    to = made.world.submit()
    made.world.handle(ev.DrainRequested("prefill-0", 5.0, "requested by an operator"))
    for _ in range(24):
        made.wait(1)
    assert made.core.workers.by_id("prefill-0") is not None
    made.wait(3)
    assert made.core.workers.by_id("prefill-0") is None
    assert made.ended == ["prefill-0"]
    assert made.world.kinds(to) == ["Accepted"]


def test_a_starting_worker_is_given_up_when_it_is_drained(new_world):
    made = Launched(new_world)
    made.world.handle(ev.DrainRequested("decode-0", 5.0, "requested by an operator"))
    assert made.ended == ["decode-0"]


def test_a_worker_that_comes_up_after_it_was_given_up_gets_nothing(launched):
    made = launched(1, 2)
    made.world.handle(ev.ScaleRequested(DECODE, 3))
    made.wait(1)
    late = made.started[-1]
    made.world.handle(ev.DrainRequested(late, 30.0, "test"))
    made.world.attach(late, common_pb2.ROLE_DECODE)
    for _ in range(4):
        made.world.submit()
    assert not len(made.core.workers.by_id(late).ledger)
    commands = made.world.commands[late]
    assert [type(one) for one in commands] == [cluster_pb2.DrainCommand]
    made.world.handle(ev.WorkerExited(late, "was ended", gone=True))
    assert made.core.workers.by_id(late) is None
    assert not made.core.scaler.launches.has(late)


def test_nothing_is_started_where_nothing_starts_workers(world):
    scaler = world.core.scaler
    refused = scaler.error()
    assert isinstance(refused, errors.FailedPrecondition)
    assert "baton up" in str(refused)
    assert scaler.desired(PREFILL) == 0


def test_nothing_is_started_once_the_coordinator_stops(launched):
    made = launched()
    made.world.handle(ev.AdmissionClosed())
    made.world.handle(ev.WorkerExited("decode-0", "was killed by SIGKILL"))
    made.wait(30)
    assert len(made.started) == 2


def test_a_coordinator_that_stops_exports_no_desired_size(launched):
    """Alerts take 0 for a pool that its load has shrunk to nothing."""
    made = launched(autoscale=True)
    config = parse({"scaling": {"autoscale": True}}, "test")

    def desired() -> list[float]:
        return [
            sample.value
            for family in CoreCollector(made.core, config).collect()
            if family.name == "baton_workers_desired"
            for sample in family.samples
        ]

    assert desired() == [1, 1]
    made.world.handle(ev.AdmissionClosed())
    assert desired() == []


# ---- Sizes decided by the load.


def test_other_targets_count_from_the_next_decision_on(launched):
    made = launched(autoscale=True)
    assert made.core.targets.by_lane["interactive"].ttft_s == 0.5
    changed = replace(made.core.targets.by_lane["interactive"], ttft_s=0.1, percentile=99.0)
    made.world.handle(ev.TargetsRequested({"interactive": changed}))
    made.world.submit(num_prompt=200)
    made.wait(6)
    assert "over 100 ms" in made.reason(PREFILL)
    assert made.core.targets.by_lane["interactive"] == Targets(0.1, 0.05, 99.0)


def test_a_request_wakes_pools_that_sleep_and_waits_for_them(launched, out):
    made = launched(autoscale=True, idle_s=30.0)
    made.wait(200)
    assert not len(made.core.workers)
    assert made.core.can_serve
    to = made.world.submit()
    made.world.after(0.5)
    assert made.started[2:] == ["prefill-1", "decode-1"]
    made.wait(8)
    assert made.world.kinds(to) == ["Accepted"]
    made.come_up()
    (command,) = made.world.commands["prefill-1"]
    assert command.spec.request_id == "r1"
    made.wait(20)
    assert made.ids(PREFILL) == {"prefill-1"}


def test_requests_fail_while_a_pool_cannot_start_workers(launched):
    made = launched(autoscale=True, idle_s=30.0)
    made.wait(200)
    made.world.submit()
    made.world.after(0.5)
    made.world.handle(ev.WorkerExited("prefill-1", "could not be started: no room"))
    assert not made.core.can_serve
    made.wait(70)
    failed = made.world.sent[next(iter(made.world.sent))][-1]
    assert isinstance(failed.error, errors.Unavailable)


def test_a_process_that_ends_holds_its_gpus_until_it_has(launched):
    made = launched(1, 2, autoscale=False, max_gpus=3)
    made.world.handle(ev.DrainRequested("decode-1", 5.0, "test"))
    made.world.handle(ev.ScaleRequested(DECODE, 1))
    made.world.handle(ev.ScaleRequested(PREFILL, 2))
    worker = made.core.workers.by_id("decode-1")
    stopped = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_STOPPED)
    made.world.handle(ev.WorkerChanged(worker.key, stopped))
    for _ in range(10):
        made.world.after(1.0)
        for one in made.core.workers:
            made.world.handle(ev.WorkerHeard(one.key))
    assert made.ended == ["decode-1"]
    assert len(made.started) == 3
    assert "0 of 3 GPUs are free" in made.reason(PREFILL)
    assert [made.core.scaler.lacking_gpus(pool) for pool in (PREFILL, DECODE)] == [1, 0]
    made.wait(6)
    assert made.core.scaler.lacking_gpus(PREFILL) == 0
    assert made.started[-1] == "prefill-1"


def test_child_processes_of_a_killed_worker_hold_its_gpus_until_they_end(launched):
    made = launched(1, 2, autoscale=False, max_gpus=3)
    made.world.handle(ev.DrainRequested("decode-1", 5.0, "test"))
    made.world.handle(ev.ScaleRequested(DECODE, 1))
    made.world.handle(ev.ScaleRequested(PREFILL, 2))
    # The worker's main process has ended; its child processes get time to end.
    made.world.handle(ev.WorkerExited("decode-1", "was killed by SIGKILL"))
    for _ in range(10):
        made.world.after(1.0)
        for one in made.core.workers:
            made.world.handle(ev.WorkerHeard(one.key))
    assert made.ended == ["decode-1"]
    assert len(made.started) == 3
    made.wait(6)
    assert made.started[-1] == "prefill-1"


def test_a_size_by_hand_is_kept_at_first_when_it_is_handed_back_at_once(launched):
    """The load has been known for only a few seconds, so no worker is removed."""
    made = launched()
    made.world.handle(ev.ScaleRequested(DECODE, 3))
    made.wait(1)
    made.come_up()
    made.world.handle(ev.AutoscaleRequested(True))
    made.wait(10)
    made.world.handle(ev.AutoscaleRequested(False))
    made.wait(200)
    assert len(made.ids(DECODE)) == 3


def test_autoscaling_off_starts_nothing_beside_workers_of_elsewhere(launched):
    made = launched(1, 2, autoscale=True)
    made.world.attach("guest", common_pb2.ROLE_DECODE)
    made.wait(10)
    # The guest counts while the load sizes the pool.
    assert made.core.scaler.desired(DECODE) == 3
    made.world.handle(ev.AutoscaleRequested(False))
    made.wait(30)
    assert len(made.started) == 3
    assert made.ids(DECODE) == {"decode-0", "decode-1", "guest"}
    assert "autoscaling is off: 2 wanted" in made.reason(DECODE)


def test_autoscaling_off_keeps_a_worker_where_it_was_just_flipped_to(launched):
    made = launched(2, 2, autoscale=True)
    made.world.handle(ev.FlipRequested("prefill-1", common_pb2.ROLE_DECODE))
    made.world.handle(ev.AutoscaleRequested(False))
    made.answer_flips()
    made.wait(30)
    assert made.ids(DECODE) == {"decode-0", "decode-1", "prefill-1"}
    assert len(made.started) == 4
    assert made.ended == []


@pytest.mark.parametrize("into", [DECODE, PREFILL])
def test_a_flipped_worker_keeps_the_gpus_that_it_was_started_with(launched, into):
    limits = {
        "prefill": PoolLimits(0, 4, gpus=2),
        "decode": PoolLimits(0, 4, gpus=1),
    }
    made = launched(2, 2, limits=limits, max_gpus=6)
    role = "prefill" if into is DECODE else "decode"
    made.world.handle(ev.FlipRequested(f"{role}-1", ROLE_OF[into]))
    made.answer_flips()
    assert made.core.scaler.gpus_of(made.core.workers) == 6
    made.world.handle(ev.ScaleRequested(into, 4))
    made.wait(5)
    # They hold all GPUs that there may be.
    assert len(made.started) == 4
    assert "0 of 6 GPUs are free" in made.reason(into)


def test_a_request_wakes_pools_right_after_the_decision_that_ends_their_last(launched):
    made = launched(autoscale=True, idle_s=30.0, interval_s=60.0)
    while not made.ended:
        made.wait(1)
    made.world.submit()
    made.wait(1)
    assert made.started[2:] == ["prefill-1", "decode-1"]


def test_rates_are_those_between_two_decisions_whenever_workers_were_heard(launched):
    made = launched(autoscale=True)
    decided = made.core.scaler.decisions[PREFILL]

    def decide() -> float:
        made.world.handle(ev.AutoscaleRequested(True))
        made.world.after(0.3)
        return decided[-1].at

    first = decide()
    for worker in made.core.workers:
        made.world.handle(ev.WorkerHeard(worker.key))
    for _ in range(10):
        made.world.submit()
    made.world.after(1.0)
    second = decide()
    rate = decided[-1].numbers["interactive_requests_per_s"]
    assert rate == pytest.approx(10 / (second - first))
