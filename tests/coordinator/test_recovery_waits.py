"""Requests whose pool is empty wait for a worker that starts, up to a limit."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import RequestState
from baton.coordinator.state.workers import AttachedWorkers
from baton.runtime import errors
from baton.runtime.config import InteractiveLaneConfig, LanesConfig
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.launched_world import Launched

STOP = common_pb2.FINISH_REASON_STOP
# An ITL target of 1 ms: batch outputs are parked as soon as an interactive request decodes.
LANES = LanesConfig(interactive=InteractiveLaneConfig(itl_ms=1))


class Cell(Launched):
    """Three batch requests with output, most of them parked, and an interactive request.

    Args:
        flips: Whether another decode worker is changing its role and has not answered yet.
    """

    def __init__(self, new_world, out, *, flips=False, **config) -> None:
        super().__init__(new_world, decode=1 + flips, world={"lanes": LANES}, **config)
        self.out = out
        self.come_up()
        self.wait(11)
        if flips:
            self.world.handle(ev.FlipRequested("decode-1", common_pb2.ROLE_PREFILL))
        lanes = [common_pb2.LANE_BATCH] * 3 + [common_pb2.LANE_INTERACTIVE]
        self.streams = [self.begin(lane=lane) for lane in lanes]
        states = {self.request(to).state for to in self.streams}
        assert states == {RequestState.DECODING, RequestState.PARKED}

    def request(self, to):
        return self.core.request(f"r{to.stream}")

    def begin(self, **fields):
        to = self.world.submit(**fields)
        self.say(to, self.request(to).prefill[0], finish=0)
        self.say(to, self.request(to).decode[0])
        return to

    def say(self, to, worker_id, finish=None):
        request = self.request(to)
        at = len(request.token_ids)
        told = self.out(request.id, [at], at, finish=finish, attempt=request.attempt_number)
        self.world.step(worker_id, told)

    def lose_decode(self) -> None:
        self.world.handle(ev.WorkerExited("decode-0", "was killed by SIGKILL"))

    def num_ended(self) -> int:
        return sum(self.request(to).state is RequestState.FAILED for to in self.streams)

    def finish_all(self) -> None:
        """Finishes all requests, each as soon as it is dispatched."""
        for _ in self.streams:
            for to in self.streams:
                request = self.request(to)
                if request.state is RequestState.PREFILLING:
                    self.say(to, request.prefill[0], finish=0)
                    self.say(to, request.decode[0], finish=STOP)


@pytest.fixture
def cell(new_world, out):
    return lambda **config: Cell(new_world, out, **config)


def test_requests_wait_for_a_start_that_takes_longer_than_max_recovery_s(cell):
    made = cell(cold_start_s=90.0, start_timeout_s=100.0)
    made.lose_decode()
    made.wait(80)
    assert made.started[-1] == "decode-1"
    assert made.num_ended() == 0
    # After the start they wait for max_recovery_s again.
    made.come_up()
    made.wait(20)
    made.finish_all()
    assert {made.world.last(to).reason for to in made.streams} == {STOP}


def test_requests_do_not_wait_for_a_start_that_hangs(cell):
    """Batch requests wait up to start_timeout_s, interactive ones up to cold_start_s."""
    made = cell(cold_start_s=10.0, start_timeout_s=30.0)
    made.lose_decode()
    *batch, person = made.streams
    for waits_s, streams in ((40, [person]), (20, batch)):
        made.wait(waits_s - 1)
        assert not any(made.request(to).ended for to in streams)
        made.wait(1)
        made.world.after(0.5)
        for to in streams:
            error = made.world.last(to).error
            assert isinstance(error, errors.Unavailable)
            assert "no decode worker is attached" in str(error)
            assert f"waited {40 if to is person else 60} s" in str(error)


@pytest.mark.parametrize("how", ["answers", "attaches again", "is replaced"])
def test_a_pool_whose_last_worker_changes_its_role_is_empty(cell, how):
    """The other decode worker was lost after this one had been told to change."""
    made = cell(flips=True)
    made.lose_decode()
    states = {made.request(to).state for to in made.streams}
    assert states == {RequestState.RECOVERING, RequestState.PARKED}
    if how == "answers":
        change = cluster_pb2.WorkerStateChanged(role=common_pb2.ROLE_PREFILL)
        made.world.handle(ev.WorkerChanged(("decode-1", 1), change))
    else:
        made.world.attach("decode-1", common_pb2.ROLE_PREFILL, 1 + (how == "is replaced"))
    assert {made.request(to).state for to in made.streams} == {RequestState.RECOVERING}
    # No worker starts for them.
    made.wait(100)
    assert made.num_ended() == len(made.streams)


def test_failed_starts_do_not_prolong_the_wait(cell):
    made = cell()
    made.lose_decode()
    failed = {"decode-0"}
    for _ in range(61):
        made.wait(1)
        for worker_id in set(made.started) - failed:
            if made.pool_of(worker_id) is Pool.DECODE:
                failed.add(worker_id)
                made.world.handle(ev.WorkerExited(worker_id, "exited with code 1"))
    assert len(failed) > 2
    assert made.num_ended() == len(made.streams)


def test_waiting_requests_do_not_each_iterate_over_all_workers(new_world, out, monkeypatch):
    number, walks, every = 50, [], AttachedWorkers.__iter__
    limits = ("max_running_requests", "max_prefill_requests", "max_decode_requests")
    lanes = LanesConfig(interactive=InteractiveLaneConfig(max_queued=number))
    made = Launched(new_world, prefill=4, world={"lanes": lanes, **dict.fromkeys(limits, number)})
    made.come_up()
    requests = []
    for _ in range(number):
        to = made.world.submit()
        requests.append(made.core.request(f"r{to.stream}"))
        made.world.step(requests[-1].prefill[0], out(requests[-1].id, [0], 0, finish=0))
    made.world.handle(ev.WorkerExited("decode-0", "was killed by SIGKILL"))
    made.wait(29)

    def walk(workers):
        walks.append(workers)
        return every(workers)

    # Their timers are due after 30 s; they fail after 40 s.
    for _ in range(12):
        heard = [ev.WorkerHeard(worker.key) for worker in made.core.workers]
        monkeypatch.setattr(AttachedWorkers, "__iter__", walk)
        made.world.now += 1
        for event in (*heard, ev.Tick()):
            made.core.handle(event, made.world.now)
        monkeypatch.undo()
    assert {one.state for one in requests} == {RequestState.FAILED}
    ended = made.core.request(requests[0].id)
    assert "no decode worker is attached: waited 40 s" in ended.error
    assert 0 < len(walks) < number


def test_a_batch_request_that_lost_its_worker_waits_while_workers_are_busy(new_world, out):
    """The request waits like a parked one: until its deadline, or until the pool has no worker."""
    world = new_world(max_decode_requests=1, max_prefill_requests=1, max_request_s=600.0).pair()
    world.attach("d2", common_pb2.ROLE_DECODE)

    def begin(lane):
        to = world.submit(lane=lane)
        request = world.core.request(f"r{to.stream}")
        world.step(request.prefill[0], out(request.id, [7], finish=0))
        world.step(request.decode[0], out(request.id, [8], 1))
        return to, request

    job, of_job = begin(common_pb2.LANE_BATCH)
    _, of_person = begin(common_pb2.LANE_INTERACTIVE)
    world.handle(ev.WorkerLost(of_job.decode[0], "test"))
    world.wait(100)
    assert of_job.state is RequestState.RECOVERING
    world.step(of_person.decode[0], out(of_person.id, [9], 2, finish=STOP))
    assert of_job.state is RequestState.PREFILLING
    assert list(of_job.token_ids) == [7, 8]
    # Without any decode worker the request waits for max_recovery_s.
    world.handle(ev.WorkerLost(of_person.decode[0], "test"))
    world.wait(40)
    assert isinstance(world.last(job).error, errors.Unavailable)


@pytest.mark.parametrize("timeout_s", [None, 200.0, 100.0])
def test_a_request_that_was_parked_to_its_end_may_be_sent_again(new_world, out, timeout_s):
    """No worker had room for it; a batch sends such a line again. A timeout of its own is final."""
    world = new_world(lanes=LANES, max_request_s=150.0).pair()
    jobs = []
    for lane in [common_pb2.LANE_BATCH] * 3 + [common_pb2.LANE_INTERACTIVE]:
        to = world.submit(lane=lane, timeout_s=timeout_s)
        jobs.append(world.core.request(f"r{to.stream}"))
        world.step("p", out(jobs[-1].id, [7], finish=0))
        world.step("d", out(jobs[-1].id, [8], 1))
        world.wait(10)
    job = next(one for one in jobs if one.state is RequestState.PARKED)
    world.wait(120)
    error = world.last(job.submission.to).error
    life_s = min(150.0, timeout_s or 150.0)
    assert str(error) == f"request {job.id} did not end within {life_s:g} s; it was parked"
    if life_s < 150:
        assert isinstance(error, errors.DeadlineExceeded)
    else:
        assert isinstance(error, errors.ResourceExhausted)
        assert (error.reason, error.retry_after_s) == ("QUEUE_TIMEOUT", 1.0)


@pytest.fixture
def elastic(new_world, out):
    """An elastic cell of two workers: "p", which is full of interactive requests, and "d"."""

    class Elastic:
        def __init__(self, **changes) -> None:
            self.world = new_world(elastic=True, **changes)
            self.world.attach("p", common_pb2.ROLE_PREFILL)
            number = changes["max_decode_requests"]
            self.others = [self.begin(common_pb2.LANE_INTERACTIVE) for _ in range(number)]
            self.world.attach("d", common_pb2.ROLE_DECODE)

        def begin(self, lane):
            request = self.world.core.request(f"r{self.world.submit(lane=lane).stream}")
            if request.prefill is not None:
                self.world.step(request.prefill[0], out(request.id, [7], finish=0))
            self.world.step(request.decode[0], out(request.id, [7], len(request.token_ids)))
            return request

        def lose(self, worker_id) -> None:
            self.world.handle(ev.WorkerLost(worker_id, "test"))

        def finish_others(self) -> None:
            for other in self.others:
                self.world.step("p", out(other.id, [8], 1, finish=STOP))

    return Elastic


def test_in_an_elastic_cell_batch_waits_for_a_busy_worker_of_the_other_role(elastic):
    made = elastic(max_decode_requests=1)
    job = made.begin(common_pb2.LANE_BATCH)
    made.lose("d")
    made.world.wait(100)
    assert job.state is RequestState.RECOVERING
    made.finish_others()
    assert job.decode == ("p", 1)
    # Without any worker the request waits for max_recovery_s.
    made.lose("p")
    made.world.wait(40)
    error = made.world.core.request(job.id).error
    assert "no prefill and no decode worker is attached: waited 30 s" in error


def test_in_an_elastic_cell_parked_requests_wait_for_a_worker_of_the_other_role(elastic, out):
    """A full worker of the other role still serves, so a parked request waits without a limit."""
    made = elastic(max_decode_requests=2, lanes=LANES)
    jobs = [made.begin(common_pb2.LANE_BATCH) for _ in range(2)]
    made.begin(common_pb2.LANE_INTERACTIVE)
    (parked,) = (one for one in jobs if one.state is RequestState.PARKED)
    made.lose("d")
    made.world.wait(100)
    assert parked.state is RequestState.PARKED
    made.finish_others()
    # A worker computes one batch prompt at a time.
    (first,) = (job for job in jobs if job.decode is not None)
    made.world.step("p", out(first.id, [9], 1, attempt=first.attempt_number))
    assert [job.decode for job in jobs] == [("p", 1)] * 2
    assert [job.decode for job in jobs] == [("p", 1)] * 2


def test_in_an_elastic_cell_a_full_worker_is_busy_and_not_missing(elastic):
    made = elastic(max_decode_requests=1)
    made.lose("d")
    waiting = made.world.submit()
    made.world.wait(100)
    assert made.world.last(waiting).error.reason == "QUEUE_TIMEOUT"


def test_in_an_elastic_cell_requests_wait_for_a_start_in_either_pool(new_world, out):
    times = {"cold_start_s": 90.0, "start_timeout_s": 100.0}
    made = Launched(new_world, 1, 0, **times, world={"elastic": True})
    made.come_up()
    to = made.world.submit()
    made.world.step("prefill-0", out("r1", [7]))
    made.world.handle(ev.WorkerExited("prefill-0", "was killed by SIGKILL"))
    made.wait(80)
    assert made.world.kinds(to) == ["Accepted", "Delta"]
    made.come_up()
    made.world.step("prefill-1", out("r1", [8], 1, finish=STOP, attempt=2))
    assert made.world.tokens(to) == [7, 8]
