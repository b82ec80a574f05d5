"""Rollouts under a virtual clock: who gets the canary, and what becomes of whom when it goes."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from launched_world import Launched

from baton.coordinator.core import events as ev
from baton.coordinator.core.request import RequestState
from baton.coordinator.rollouts.revision import Revision
from baton.coordinator.routing.load_index import Pool
from baton.runtime import errors
from baton.runtime.config import InteractiveLaneConfig, LanesConfig
from baton.runtime.request_digest import request_digest
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP = common_pb2.FINISH_REASON_STOP
SERVING, DRAINING = cluster_pb2.WORKER_STATE_SERVING, cluster_pb2.WORKER_STATE_DRAINING


class Two:
    """A world of two revisions: workers p, p2, d, d2 of "1" and cp, cp2, cd, cd2 of "r2"."""

    def __init__(self, new_world, out, share=1.0, **changes):
        wide = {"max_running_requests": 10**5, "max_prefill_requests": 10**5}
        self.world = new_world(**{**wide, "max_decode_requests": 10**5, **changes})
        self.out = out
        for name, role in (("p", PREFILL), ("p2", PREFILL), ("d", DECODE), ("d2", DECODE)):
            self.world.attach(name, role)
            self.world.attach(f"c{name}", role, revision="r2")
        if share is not None:
            self.start(share)

    def start(self, share):
        assert self.core.rollouts.start_error(Revision("r2"), share, {}) is None
        self.world.handle(ev.RolloutAsked(Revision("r2"), share, {}))

    @property
    def core(self):
        return self.world.core

    def request(self, to):
        return self.core.request(f"r{to.stream}")

    def revision(self, to):
        return self.request(to).revision

    def first_token(self, to):
        request = self.request(to)
        output = self.out(request.id, [7], text="a", finish=0, attempt=request.attempt)
        self.world.step(request.prefill[0], output)

    def token(self, to, finish=None):
        """The next one, by its decode worker; its number is its place."""
        request = self.request(to)
        offset = len(request.token_ids)
        output = self.out(
            request.id, [offset], offset, finish=finish, attempt=request.attempt_number
        )
        self.world.step(request.decode[0], output)

    def begin(self, **fields):
        """A request that decodes."""
        to = self.world.submit(**fields)
        self.first_token(to)
        self.token(to)
        return to

    def state(self, worker_id):
        worker = self.core.workers.by_id(worker_id)
        return worker.state if worker is not None else None

    def beat(self, seconds=1):
        """Time passes; everyone is heard, and those that are to leave do."""
        for _ in range(seconds):
            self.world.after(1.0)
            for worker in self.core.workers:
                self.world.handle(ev.WorkerHeard(worker.key))
                if worker.state == DRAINING and not worker.assigned:
                    stopped = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_STOPPED)
                    self.world.handle(ev.WorkerChanged(worker.key, stopped))

    def ids(self):
        return {worker.id for worker in self.core.workers}


@pytest.fixture
def two(new_world, out):
    def make(share=1.0, **changes):
        return Two(new_world, out, share, **changes)

    return make


# ---- Who gets it.


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_canary_gets_its_share_and_sessions_stick(two, share):
    cell = two(share)
    number = 600
    found = {}
    for session in range(number):
        to = cell.world.submit(session_id=f"s{session}", num_prompt=8)
        found[session] = cell.revision(to)
        cell.world.handle(ev.RequestCancelled(f"r{to.stream}"))
    count = sum(one == "r2" for one in found.values())
    # Five standard deviations.
    assert abs(count - number * share) < 5 * math.sqrt(number * share * (1 - share))
    for session in range(0, number, 7):
        to = cell.world.submit(session_id=f"s{session}", num_prompt=8)
        assert cell.revision(to) == found[session]
        cell.world.handle(ev.RequestCancelled(f"r{to.stream}"))


def test_a_share_that_grows_takes_along_who_was_in_it(two):
    cell = two(0.1)
    before = {name for name in range(200) if _assigned(cell, name) == "r2"}
    cell.world.handle(ev.ShareAsked(0.4))
    after = {name for name in range(200) if _assigned(cell, name) == "r2"}
    assert before < after


def _assigned(cell, name):
    to = cell.world.submit(session_id=f"s{name}", num_prompt=8)
    found = cell.revision(to)
    cell.world.handle(ev.RequestCancelled(f"r{to.stream}"))
    return found


def test_a_revision_that_nobody_rolls_out_gets_nothing(two):
    cell = two(None)
    for _ in range(20):
        assert cell.revision(cell.world.submit()) == "1"
    assert not any(worker.assigned for worker in cell.core.workers if worker.revision == "r2")


def test_it_is_said_where_only_another_revision_is_attached(new_world):
    world = new_world()
    world.attach("p", PREFILL, revision="v7")
    world.attach("d", DECODE, revision="v7")
    assert not world.core.can_serve
    to = world.submit()
    for _ in range(70):
        world.after(1.0)
        for worker in world.core.workers:
            world.handle(ev.WorkerHeard(worker.key))
    assert "revision '1' is the stable one, attached are ['v7']" in str(world.last(to).error)


def test_who_is_busy_is_not_said_to_be_missing(new_world):
    world = new_world(max_prefill_requests=1, max_decode_requests=1).pair()
    world.attach("p7", PREFILL, revision="v7")
    world.submit()
    to = world.submit()
    for _ in range(70):
        world.after(1.0)
        for worker in world.core.workers:
            world.handle(ev.WorkerHeard(worker.key))
    assert str(world.last(to).error).startswith("every worker is busy: waited")


def test_nothing_is_kept_of_revisions_that_clients_make_up(new_world):
    world = new_world()
    for number in range(20):
        to = world.submit(known_token_ids=[1], revision=f"none-{number}")
        world.handle(ev.StreamCancelled(to))
    # The stable one's, and the last.
    assert len(world.core.placers) <= 2


def test_a_canary_that_serves_in_one_pool_only_gets_nothing(two):
    cell = two(None)
    for name in ("cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    refused = cell.core.rollouts.start_error(Revision("r2"), 1.0, {})
    assert isinstance(refused, errors.FailedPrecondition)
    assert "no decode worker of revision 'r2'" in str(refused)
    cell.world.attach("cd", DECODE, incarnation=2, revision="r2")
    cell.start(1.0)
    assert cell.revision(cell.world.submit()) == "r2"
    cell.world.handle(ev.WorkerLost("cd", "was killed"))
    assert cell.revision(cell.world.submit()) == "1"


def test_what_does_not_fit_the_canarys_context_stays_with_the_stable_one(two, say_hello):
    cell = two(None)
    for name in ("cp", "cp2", "cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    model = say_hello("x", PREFILL).model
    model.max_model_len, model.revision = 64, "other weights"
    for name, role in (("cp", PREFILL), ("cd", DECODE)):
        cell.world.attach(name, role, incarnation=2, revision="r2", model=model)
    cell.start(1.0)
    assert cell.revision(cell.world.submit(num_prompt=20)) == "r2"
    assert cell.revision(cell.world.submit(num_prompt=80)) == "1"


def test_an_adapter_that_the_canary_lacks_stays_with_the_stable_one(two, say_hello):
    cell = two(None)
    for name in ("cp", "cp2", "cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    model = say_hello("x", PREFILL).model
    model.adapters.add(name="law")
    for name, role in (("cp", PREFILL), ("cd", DECODE)):
        cell.world.attach(name, role, incarnation=2, revision="r2", model=model)
    cell.start(1.0)
    assert cell.revision(cell.world.submit(adapter="law")) == "r2"
    assert cell.revision(cell.world.submit(adapter="poetry")) == "1"


def test_workers_of_one_revision_must_be_alike_those_of_two_need_not(world, say_hello):
    fingerprint = say_hello("x", PREFILL).fingerprint
    fingerprint.num_layers = 8
    world.attach("c", PREFILL, revision="r2", fingerprint=fingerprint)
    assert {one.id for one in world.core.workers} == {"p", "d", "c"}
    (refusal,) = world.attach("c2", DECODE, revision="r2")
    assert "fingerprint.num_layers is 4, here 8" in str(refusal.error)
    model = say_hello("x", PREFILL).model
    model.vocab_size = 600
    (refusal,) = world.attach("c3", DECODE, revision="r3", model=model)
    assert "model.vocab_size is 600, here 512" in str(refusal.error)
    (refusal,) = world.attach("c4", DECODE, revision="a b")
    assert isinstance(refusal.error, errors.InvalidArgument)


def test_a_full_canary_holds_up_nobody_else(two):
    cell = two(0.5, max_prefill_requests=2, max_decode_requests=2)
    waiting = []
    for number in range(40):
        to = cell.world.submit(session_id=f"s{number}")
        request = cell.request(to)
        if request is None or request.ended:
            continue
        if request.waits:
            waiting.append(request)
        elif request.revision == "1":
            cell.world.handle(ev.RequestCancelled(request.id))
    # Those of the canary wait for it; no stable one waits behind them.
    assert waiting
    assert {one.revision for one in waiting} == {"r2"}


# ---- Deaths.


@pytest.mark.parametrize("leg", ["cp", "cd"])
def test_a_request_whose_output_has_begun_goes_on_with_its_revision(two, leg):
    cell = two(1.0)
    to = cell.begin()
    request = cell.request(to)
    assert request.revision == "r2"
    lost = (request.prefill if leg == "cp" else request.decode)[0]
    cell.world.handle(ev.WorkerLost(lost, "was killed"))
    if leg == "cd":
        assert request.attempt == 2
        assert cell.core.workers.get(request.prefill).revision == "r2"
        assert cell.core.workers.get(request.decode).revision == "r2"
        cell.first_token(to)
    cell.token(to, finish=STOP)
    assert cell.world.last(to).reason == STOP


def test_what_has_begun_waits_for_its_revision_and_fails_when_it_is_gone(two):
    cell = two(1.0)
    to = cell.begin()
    for name in ("cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    assert cell.request(to).waits
    # A worker of its revision comes back: it goes on.
    cell.world.attach("cd3", DECODE, revision="r2")
    assert cell.request(to).decode[0] == "cd3"
    for name in ("cd3", "cp", "cp2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    assert cell.request(to).waits
    cell.world.handle(ev.AbortAsked("test"))
    error = cell.world.last(to).error
    assert isinstance(error, errors.Unavailable)
    assert error.reason == "REVISION_GONE"
    assert "'r2'" in str(error)


@pytest.mark.parametrize("comes", [True, False])
def test_what_is_parked_on_a_dead_canary_waits_no_longer_than_others(two, comes):
    """Batch that made room for interactive work is nobody's whose loss would be noticed."""
    lanes = LanesConfig(interactive=InteractiveLaneConfig(itl_ms=1))
    cell = two(1.0, lanes=lanes)
    cell.world.handle(ev.WorkerLost("cd2", "was killed"))
    batch = [cell.begin(lane=common_pb2.LANE_BATCH) for _ in range(3)]
    person = cell.begin()
    parked = [to for to in batch if cell.request(to).state is RequestState.PARKED]
    assert len(parked) == 2
    cell.world.handle(ev.WorkerLost("cd", "was killed"))
    cell.beat(10)
    assert not any(cell.request(to).ended for to in (*batch, person))
    if comes:
        cell.world.attach("cd3", DECODE, revision="r2")
        for _ in batch:
            for to in (person, *batch):
                if cell.request(to).state is RequestState.PREFILLING:
                    cell.first_token(to)
                    cell.token(to, finish=STOP)
        assert {cell.world.last(to).reason for to in (*batch, person)} == {STOP}
        return
    cell.beat(21)
    for to in (*batch, person):
        error = cell.world.last(to).error
        assert isinstance(error, errors.Unavailable)
        assert "no decode worker is attached" in str(error)
        assert "waited 30 s" in str(error)


def test_what_has_not_begun_goes_to_the_stable_revision(two):
    cell = two(1.0)
    running = cell.world.submit()
    for name in ("cd", "cd2"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    assert cell.revision(running) == "1"
    cell.first_token(running)
    cell.token(running, finish=STOP)
    assert cell.world.last(running).reason == STOP
    assert cell.core.rollouts.rollout.sides["r2"].num_moved == 1


def test_what_both_revisions_refuse_is_not_held_against_the_canary(two):
    cell = two()
    to = cell.world.submit(slo_ttft_s=1e-9)
    assert cell.world.last(to).error.reason == "TOO_LATE"
    assert cell.core.rollouts.rollout.sides["r2"].num_moved == 0


def test_a_silent_worker_is_no_reason_to_leave_the_revision(two):
    """Its only peer of the same revision is gone: what has begun stays, the rest goes elsewhere."""
    cell = two(1.0)
    to = cell.begin()
    fresh = cell.world.submit()
    decoder = cell.request(to).decode[0]
    other = "cd2" if decoder == "cd" else "cd"
    cell.world.handle(ev.WorkerLost(other, "was killed"))
    for _ in range(6):
        cell.world.after(1.0)
        for worker in cell.core.workers:
            if worker.id != decoder:
                cell.world.handle(ev.WorkerHeard(worker.key))
    assert cell.request(to).decode[0] == decoder
    assert [cell.revision(one) for one in (fresh, cell.world.submit())] == ["1", "1"]
    cell.token(to)
    assert cell.revision(cell.world.submit()) == "r2"


# ---- The end of a rollout.


@pytest.mark.parametrize("how", ["promote", "abort"])
def test_no_request_is_lost_when_a_rollout_ends(two, how):
    cell = two(0.5)
    running = [cell.begin(session_id=f"s{number}") for number in range(12)]
    fresh = [cell.world.submit(session_id=f"s{number}") for number in range(12)]
    assert {cell.revision(to) for to in running} == {"1", "r2"}
    before = {to: cell.revision(to) for to in running}
    event = ev.PromotionAsked() if how == "promote" else ev.AbortAsked("test")
    cell.world.handle(event)
    stays, leaves = ("r2", "1") if how == "promote" else ("1", "r2")
    assert cell.revision(cell.world.submit()) == stays
    # One that has begun loses its worker while its revision leaves: there is another one for it.
    victim = next(to for to in running if before[to] == leaves)
    lost = cell.request(victim).decode[0]
    cell.world.handle(ev.WorkerLost(lost, "was killed"))
    cell.beat(3)
    for to in fresh:
        cell.first_token(to)
    for to in running:
        assert cell.revision(to) == before[to]
        if cell.request(to).prefill is not None and not cell.request(to).prefill_done:
            cell.first_token(to)
    for to in [*running, *fresh]:
        cell.token(to, finish=STOP)
        assert cell.world.last(to).reason == STOP
    cell.beat(6)
    assert {worker.revision for worker in cell.core.workers} == {stays}
    assert not len(cell.core.rollouts.retiring)
    assert cell.core.workers.stable == stays
    assert cell.core.can_serve


def test_a_revision_that_leaves_keeps_a_worker_in_each_pool_while_it_is_needed(two):
    cell = two(1.0)
    to = cell.begin()
    cell.world.handle(ev.AbortAsked("test"))
    cell.beat(3)
    left = {one.role for one in cell.core.workers if one.revision == "r2"}
    assert left == {PREFILL, DECODE}
    assert len(cell.ids()) == 6
    cell.token(to, finish=STOP)
    cell.beat(5)
    assert cell.ids() == {"p", "p2", "d", "d2"}


def test_who_comes_back_finds_the_revision_that_began(two):
    """A broken connection takes its requests along, and they are back a moment later."""
    cell = two(1.0)
    to = cell.begin()
    known = list(cell.request(to).token_ids)
    cell.world.handle(ev.AbortAsked("test"))
    cell.world.handle(ev.SessionLost(to.session))
    cell.beat()
    again = cell.world.submit(session=2, known_token_ids=known, revision="r2")
    cell.first_token(again)
    cell.token(again, finish=STOP)
    assert cell.world.last(again).reason == STOP
    cell.beat(5)
    assert cell.ids() == {"p", "p2", "d", "d2"}


def test_what_does_not_end_in_time_fails_and_says_why(two):
    cell = two(1.0)
    to = cell.begin()
    cell.world.handle(ev.AbortAsked("test", drain_s=20.0))
    cell.beat(18)
    assert not cell.request(to).ended
    cell.beat(5)
    assert cell.world.last(to).error.reason == "REVISION_GONE"
    cell.beat(3)
    assert cell.ids() == {"p", "p2", "d", "d2"}


def test_what_nobody_has_seen_anything_of_in_time_is_computed_by_the_stable_one(two):
    cell = two(1.0)
    to = cell.world.submit()
    cell.world.handle(ev.AbortAsked("test", drain_s=20.0))
    cell.beat(23)
    assert cell.revision(to) == "1"
    cell.first_token(to)
    cell.token(to, finish=STOP)
    assert cell.world.last(to).reason == STOP
    assert cell.ids() == {"p", "p2", "d", "d2"}


@pytest.mark.parametrize("fails", [True, False])
def test_a_canary_that_is_worse_is_aborted_by_itself_if_so_wished(two, fails):
    cell = two(None)
    cell.world.handle(ev.RolloutAsked(Revision("r2"), 0.5, {}, abort_if_worse=True))
    for number in range(120):
        to = cell.world.submit(session_id=f"s{number}", num_prompt=8)
        request = cell.request(to)
        if fails and request.revision == "r2":
            wrong = cluster_pb2.RequestOutput(request_id=request.id, attempt=1)
            wrong.failed.code, wrong.failed.message = 3, "no such argument"
            cell.world.step(request.prefill[0], wrong)
        else:
            cell.first_token(to)
            cell.token(to, finish=STOP)
    cell.beat(2)
    rollouts = cell.core.rollouts
    assert (rollouts.rollout is None) == fails
    if fails:
        assert "the canary is worse" in rollouts.outcome
        assert "requests failed" in rollouts.outcome
        cell.beat(3)
        assert cell.ids() == {"p", "p2", "d", "d2"}


def test_wrong_calls_are_refused_by_name(two):
    cell = two(None)
    rollouts = cell.core.rollouts

    def refusal(name="r2", share=0.1, sizes=None, **fields):
        return rollouts.start_error(Revision(name, **fields), share, sizes or {})

    assert "stable" in str(refusal("1"))
    assert isinstance(refusal("a b"), errors.InvalidArgument)
    assert "share is 1.5" in str(refusal(share=1.5))
    assert "starts no workers" in str(refusal(model="/models/new"))
    assert "no prefill and no decode worker of revision 'r9'" in str(refusal("r9"))
    for refused in (rollouts.promote_error(), rollouts.abort_error(), rollouts.share_error(0.5)):
        assert isinstance(refused, errors.FailedPrecondition)
    cell.start(0.1)
    assert "a rollout of 'r2' runs" in str(refusal("r3"))
    for name in ("cp2", "cd"):
        cell.world.handle(ev.WorkerLost(name, "was killed"))
    # As many as the stable revision has, where nothing can start them.
    assert "has 1 prefill workers that serve, revision '1' 2" in str(rollouts.promote_error())
    cell.world.handle(ev.WorkerLost("cd2", "was killed"))
    cell.world.attach("cp2", PREFILL, incarnation=2, revision="r2")
    assert "no decode worker that serves" in str(rollouts.promote_error())


# ---- A restarted coordinator.


def test_known_tokens_go_on_with_the_revision_that_made_them(two):
    """After a restart there is no rollout: workers of it get what they began, and nothing new."""
    cell = two(None)
    to = cell.world.submit(known_token_ids=[7, 8], revision="r2")
    assert cell.revision(to) == "r2"
    cell.first_token(to)
    cell.token(to, finish=STOP)
    assert cell.world.last(to).reason == STOP
    assert cell.revision(cell.world.submit()) == "1"
    # Once nobody may come back any more who goes on with it.
    cell.beat(3)
    gone = cell.world.submit(known_token_ids=[7, 8], revision="r0")
    assert cell.world.last(gone).error.reason == "REVISION_GONE"


def test_a_rollout_outlives_its_coordinator(two, new_world, say_hello):
    """Workers keep what they were told last, and the next coordinator takes the newest."""
    cell = two(0.4)
    cell.world.handle(ev.ShareAsked(0.25))
    record = latest_record(cell.world, "d")
    after = new_world()

    def back(name, role, revision, record, incarnation=1):
        hello = say_hello(name, role, incarnation, revision=revision, generation=77)
        hello.rollout.CopyFrom(record)
        after.handle(ev.WorkerAttached(hello, returns=True))

    stale = cluster_pb2.RolloutRecord(version=1, configured="1", stable="1", canary="r0")
    for name, role, revision, told in (
        ("p", PREFILL, "1", stale),
        ("cp", PREFILL, "r2", record),
        ("d", DECODE, "1", record),
        ("cd", DECODE, "r2", record),
    ):
        back(name, role, revision, told)
    rollouts = after.core.rollouts
    assert (rollouts.traffic.canary, rollouts.traffic.share) == ("r2", 0.25)
    assert rollouts.traffic.open
    # The same sessions as before.
    for number in range(40):
        assert _assigned(cell, number) == _found(after, number)
    after.handle(ev.PromotionAsked())
    assert after.core.workers.stable == "r2"
    promoted = latest_record(after, "cd")
    # After a promotion too; unless the configuration has been changed since.
    for configured, stable in (("1", "r2"), ("r9", "r9")):
        third = new_world(revision=configured)
        hello = say_hello("cd", DECODE, revision="r2", generation=78)
        hello.rollout.CopyFrom(promoted)
        third.handle(ev.WorkerAttached(hello, returns=True))
        assert third.core.workers.stable == stable


def test_who_comes_before_the_first_worker_after_a_promotion_is_served(new_world, say_hello):
    """The coordinator does not know yet which revision is the stable one."""
    world = new_world()
    early = world.submit()
    record = cluster_pb2.RolloutRecord(version=3, configured="1", stable="r2")
    for name, role in (("cp", PREFILL), ("cd", DECODE)):
        hello = say_hello(name, role, revision="r2", generation=77)
        hello.rollout.CopyFrom(record)
        world.handle(ev.WorkerAttached(hello, returns=True))
    for _ in range(3):
        world.after(1.0)
        for worker in world.core.workers:
            world.handle(ev.WorkerHeard(worker.key))
    assert world.kinds(early) == ["Accepted"]
    request = world.core.request("r1")
    assert (request.revision, request.prefill[0]) == ("r2", "cp")


def latest_record(world, worker):
    records = (one for one in world.commands[worker] if isinstance(one, cluster_pb2.RolloutRecord))
    return list(records)[-1]


def _found(world, number):
    to = world.submit(session_id=f"s{number}", num_prompt=8)
    request = world.core.request(f"r{to.stream}")
    world.handle(ev.RequestCancelled(request.id))
    return request.revision


def _running():
    """The first request that is submitted, as the worker says that goes on with it."""
    sampling = common_pb2.SamplingParams(max_tokens=8)
    return cluster_pb2.RunningRequest(
        request_id="r1",
        attempt=3,
        role=DECODE,
        next_offset=2,
        token_ids=[7, 8],
        decoding=True,
        tenant="default",
        digest=request_digest(list(range(20)), sampling),
    )


def test_a_request_that_is_adopted_is_on_its_workers_revision(two, say_hello):
    cell = two(None)
    hello = say_hello("cd9", DECODE, revision="r2", generation=77)
    hello.running.append(_running())
    cell.world.handle(ev.WorkerAttached(hello, returns=True))
    to = cell.world.submit(known_token_ids=[7])
    request = cell.request(to)
    assert (request.revision, request.decode[0]) == ("r2", "cd9")
    cell.world.handle(ev.WorkerLost("cd9", "was killed"))
    assert cell.core.workers.get(request.decode).revision == "r2"


def test_a_worker_that_leaves_is_found_by_who_comes_back_for_what_it_goes_on_with(two, say_hello):
    cell = two(None)
    # The last of its revision, which the coordinator before this one had told to leave.
    hello = say_hello("d9", DECODE, revision="r0", generation=77, state=DRAINING)
    hello.running.append(_running())
    cell.world.handle(ev.WorkerAttached(hello, returns=True))
    cell.world.after(1.0)
    to = cell.world.submit(known_token_ids=[7], revision="r0")
    assert cell.request(to).decode[0] == "d9"
    assert cell.world.tokens(to) == [8]


# ---- With a launcher.


@pytest.fixture
def launched(new_world):
    def make(prefill=2, decode=2, **options):
        made = Launched(new_world, prefill, decode, **options)
        made.come_up()
        made.wait(11)
        return made

    return make


def of_revision(made, revision):
    return {one.id for one in made.core.workers if one.revision == revision}


def test_a_rollout_starts_its_workers_and_promotion_raises_them(launched):
    made = launched()
    change = Revision("r2", "/models/new", {"max_num_seqs": 8})
    made.world.handle(ev.RolloutAsked(change, 0.1, {}))
    assert made.started[4:] == ["prefill-r2-0", "decode-r2-0"]
    (event,) = [
        one
        for one in made.world.membership
        if isinstance(one, ev.StartWorker) and one.worker_id == "decode-r2-0"
    ]
    assert event.revision == change
    assert not made.core.rollouts.traffic.open
    assert "no prefill worker that serves" in str(made.core.rollouts.promote_error())
    made.come_up()
    assert made.core.rollouts.traffic.open
    # The canary's are beside the pools, which keep their sizes.
    made.wait(20)
    assert len(made.started) == 6
    assert made.ids(Pool.PREFILL) == {"prefill-0", "prefill-1", "prefill-r2-0"}
    made.world.handle(ev.PromotionAsked())
    assert made.started[6:] == ["prefill-r2-1", "decode-r2-1"]
    assert made.core.workers.stable == "1"
    made.come_up()
    assert made.core.workers.stable == "r2"
    made.wait(10)
    assert of_revision(made, "1") == set()
    assert len(of_revision(made, "r2")) == 4
    assert len(made.started) == 8
    # What takes the place of one that dies is of the new one.
    made.world.handle(ev.WorkerExited("decode-r2-0", "was killed by SIGKILL"))
    made.world.after(0.5)
    assert made.revision_of(made.started[-1]) == "r2"


def test_who_starts_workers_serves_with_those_whatever_one_remembers(new_world, say_hello):
    world = new_world()
    hello = say_hello("p9", PREFILL, revision="r2", generation=77)
    hello.rollout.MergeFrom(
        cluster_pb2.RolloutRecord(version=3, configured="1", stable="r2", retiring=["1"])
    )
    world.handle(ev.WorkerAttached(hello, returns=True))
    assert world.core.workers.stable == "r2"
    world.handle(ev.LauncherReady({Pool.PREFILL: 1, Pool.DECODE: 1}))
    started = [one for one in world.membership if isinstance(one, ev.StartWorker)]
    assert {one.revision.name for one in started} == {world.core.workers.stable} == {"1"}
    assert world.commands["p9"][-1].stable == "1"


def test_an_aborted_rollout_leaves_nothing(launched):
    made = launched()
    made.world.handle(ev.RolloutAsked(Revision("r2"), 0.1, {Pool.DECODE: 3}))
    assert len(made.started) == 4 + 4
    made.world.handle(ev.AbortAsked("test"))
    assert set(made.ended) == set(made.started[4:])
    made.wait(5)
    assert len(made.started) == 8
    assert len(made.core.workers) == 4
    assert made.core.rollouts.start_error(Revision("r2"), 0.1, {}) is None


def test_a_canary_that_does_not_come_up_is_told_and_holds_up_nothing(launched):
    made = launched()
    made.world.handle(ev.RolloutAsked(Revision("r2"), 0.1, {}))
    for _ in range(4):
        made.world.handle(ev.WorkerExited(made.started[-1], "exited with code 1", "no such model"))
        made.wait(3)
    assert "no such model" in made.core.scaler.launches.problem(Pool.DECODE, "r2")
    assert made.core.scaler.launches.problem(Pool.DECODE) == ""
    made.world.handle(ev.WorkerExited("decode-0", "was killed by SIGKILL"))
    made.world.after(0.5)
    assert made.revision_of(made.started[-1]) == "1"
    # One that hangs is given up like any other.
    hangs = [one for one in made.started if one.startswith("prefill-r2")]
    made.wait(35)
    assert set(hangs) <= set(made.ended)


def test_a_canary_that_waits_for_room_is_told_of_as_the_canarys(launched):
    made = launched()
    made.world.handle(ev.RolloutAsked(Revision("r2"), 0.1, {}))
    made.world.handle(ev.WorkerWaits("prefill-r2-0", "waits for 1 GPU"))
    launches, told = made.core.scaler.launches, "worker prefill-r2-0 waits for 1 GPU"
    assert launches.waiting(Pool.PREFILL, "r2") == told
    assert launches.waiting(Pool.PREFILL) == ""
    assert told in str(made.core.rollouts.promote_error())


def test_there_must_be_gpus_for_both(launched):
    made = launched(max_gpus=5)
    refused = made.core.rollouts.start_error(Revision("r2"), 0.1, {})
    assert "scaling.max_gpus is 5; 4 are the stable revision's" in str(refused)


def test_gpus_of_a_revision_that_leaves_are_free_when_it_has_left(launched):
    made = launched(1, 1, max_gpus=4)
    to = made.world.submit()
    request = made.core.request("r1")
    output = cluster_pb2.RequestOutput(request_id="r1", attempt=1)
    output.delta.token_ids.append(7)
    output.finished.SetInParent()
    made.world.step(request.prefill[0], output)
    made.world.handle(ev.RolloutAsked(Revision("r2"), 0.1, {}))
    made.come_up()
    made.world.handle(ev.PromotionAsked())
    assert made.core.workers.stable == "r2"
    made.world.handle(ev.ScaleAsked(Pool.DECODE, 2))
    made.wait(5)
    # A worker of each pool is there until the request has ended.
    assert of_revision(made, "1") == {"prefill-0", "decode-0"}
    assert "decode-r2-1" not in made.started
    refused = made.core.rollouts.start_error(Revision("r3"), 0.1, {})
    assert "2 are those of revisions that are to leave" in str(refused)
    made.world.handle(ev.StreamCancelled(to))
    made.wait(10)
    assert of_revision(made, "1") == set()
    assert "decode-r2-1" in made.started


def test_a_promotion_leaves_no_output_without_the_worker_that_starts_for_it(launched):
    """It was given up with its revision, and the output failed when its own worker had to leave."""
    made = launched(1, 1)
    to = made.world.submit()
    output = cluster_pb2.RequestOutput(request_id="r1", attempt=1)
    output.delta.token_ids.append(7)
    output.finished.SetInParent()
    made.world.step(made.core.request("r1").prefill[0], output)
    made.world.handle(ev.RolloutAsked(Revision("r2"), 0.1, {}))
    made.come_up()
    made.world.handle(ev.DrainAsked("decode-0", 20.0, "test"))
    made.wait(2)
    assert made.started[-1] == "decode-1"
    made.world.handle(ev.PromotionAsked())
    made.wait(5)
    assert made.core.workers.stable == "1"
    assert made.core.request("r1").decode[0] == "decode-0"
    made.come_up()
    made.wait(2)
    assert made.core.workers.stable == "r2"
    assert "decode-1" not in made.ended
    made.world.handle(ev.WorkerExited("decode-0", "was killed by SIGKILL"))
    made.world.after(0.5)
    assert made.core.request("r1").revision == "1"
    assert made.core.request("r1").decode[0] == "decode-1"
    # It does not wait for a worker that nobody needs any more.
    made.world.handle(ev.StreamCancelled(to))
    made.wait(10)
    assert of_revision(made, "1") == set()


def test_a_canary_is_no_larger_than_a_pool_may_be(launched):
    made = launched()
    refused = made.core.rollouts.start_error(Revision("r2"), 0.1, {Pool.DECODE: 10**9})
    assert isinstance(refused, errors.InvalidArgument)
    assert "at most 4, which is scaling.decode.max_workers" in str(refused)


def test_only_stable_workers_change_their_role(launched):
    made = launched()
    made.world.handle(ev.RolloutAsked(Revision("r2"), 0.1, {Pool.DECODE: 2}))
    made.come_up()
    refused = made.core.flip_error(made.core.workers.by_id("decode-r2-0"), PREFILL)
    assert "only workers of the stable one, '1'" in str(refused)


# ---- Properties.

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "first", "token", "end", "lose", "attach", "abort", "promote", "start"]
        ),
        st.integers(0, 10**6),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=80, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(share=st.sampled_from([0.3, 0.7, 1.0]), steps=STEPS)
def test_no_request_ever_meets_two_revisions(new_world, out, share, steps):
    """Whatever happens: a pair is of one revision, and no output goes on with another."""
    cell = Two(new_world, out, share)
    began: dict[str, str] = {}
    streams = []
    incarnations = dict.fromkeys(("p", "p2", "d", "d2", "cp", "cp2", "cd", "cd2"), 1)
    for step, number in steps:
        running = cell.core.running()
        one = running[number % len(running)] if running else None
        name = sorted(incarnations)[number % len(incarnations)]
        if step == "submit":
            streams.append(cell.world.submit(session_id=f"s{number % 50}"))
        elif step == "first" and one is not None and one.prefill and not one.prefill_done:
            message = out(one.id, [len(one.token_ids)], len(one.token_ids), finish=0)
            message.attempt = one.attempt
            cell.world.step(one.prefill[0], message, incarnation=one.prefill[1])
        elif step in ("token", "end") and one is not None and one.decode and one.prefill_done:
            offset = len(one.token_ids)
            finish = STOP if step == "end" else None
            message = out(one.id, [offset], offset, finish=finish, attempt=one.attempt)
            cell.world.step(one.decode[0], message, incarnation=one.decode[1])
        elif step == "lose":
            cell.world.handle(ev.WorkerLost(name, "was killed"))
        elif step == "attach" and cell.core.workers.by_id(name) is None:
            incarnations[name] += 1
            role = PREFILL if "p" in name else DECODE
            revision = "r2" if name.startswith("c") else "1"
            cell.world.attach(name, role, incarnations[name], revision=revision)
        elif step == "abort" and cell.core.rollouts.abort_error() is None:
            cell.world.handle(ev.AbortAsked("test"))
        elif step == "promote" and cell.core.rollouts.promote_error() is None:
            cell.world.handle(ev.PromotionAsked())
        elif step == "start":
            other = next(r for r in ("1", "r2") if r != cell.core.workers.stable)
            if cell.core.rollouts.start_error(Revision(other), share, {}) is None:
                cell.world.handle(ev.RolloutAsked(Revision(other), share, {}))
        for request in cell.core.running():
            pair = [cell.core.workers.get(key) for key in (request.prefill, request.decode)]
            assert {worker.revision for worker in pair if worker} <= {request.revision}
            if len(request.token_ids):
                assert began.setdefault(request.id, request.revision) == request.revision
    for key, commands in cell.world.commands.items():
        for command in commands:
            if isinstance(command, cluster_pb2.PrefillCommand) and command.HasField("handoff"):
                target = command.handoff.target
                assert target.startswith("c") == key.startswith("c"), (key, target)
    for to in streams:
        kinds = cell.world.kinds(to)
        assert kinds.count("Finished") + kinds.count("Failed") <= 1
