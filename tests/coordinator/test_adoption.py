"""A restarted coordinator: workers and clients come back in any order, and are joined."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import RequestState
from baton.runtime.names import DEFAULT_TENANT
from baton.runtime.request_digest import request_digest
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
LENGTH = common_pb2.FINISH_REASON_LENGTH
PROMPT = list(range(20))
# What the undisturbed run gives: tokens, and a letter of text for each.
OUTPUT = [100 + index for index in range(8)]
TEXT = "abcdefgh"


def running(num_tokens=5, *, attempt=3, sampling=None, prompt=None, **fields):
    """What a worker says of request r1; the coordinators before this one dispatched it thrice."""
    sampling = common_pb2.SamplingParams(**{"max_tokens": 8, **(sampling or {})})
    values = {
        "request_id": "r1",
        "attempt": attempt,
        "role": DECODE,
        "next_offset": num_tokens,
        "token_ids": OUTPUT[:num_tokens],
        "num_text_chars": num_tokens,
        "last_text": TEXT[:num_tokens],
        "decoding": True,
        "digest": request_digest(prompt or PROMPT, sampling),
        "tenant": DEFAULT_TENANT,
    }
    return cluster_pb2.RunningRequest(**{**values, **fields})


class Restarted:
    """A coordinator that has just been restarted, with fresh workers "p" and "d2"."""

    def __init__(self, world, hello) -> None:
        self.world, self.hello = world, hello

    def comes_back(self, *running, name="d", incarnation=1):
        """A worker that another coordinator had; returns what it goes on with."""
        hello = self.hello(name, DECODE, incarnation, generation=77)
        hello.running.extend(running)
        self.world.handle(ev.WorkerAttached(hello, returns=True))
        welcomes = [one for one in self.world.membership if isinstance(one, ev.WelcomeWorker)]
        return [(one.request_id, one.attempt) for one in welcomes[-1].adopted]

    def resumes(self, num_tokens=3, **changes):
        known = {"known_token_ids": OUTPUT[:num_tokens], "known_text_chars": num_tokens}
        self.to = self.world.submit(request_id="r1", **{**known, **changes})
        return self.to

    def goes_on(self, out, begin, end, *, attempt=3, finish=None, name="d"):
        text = TEXT[begin:end]
        self.world.step(
            name, out("r1", OUTPUT[begin:end], begin, text, finish=finish, attempt=attempt)
        )

    def texts(self):
        return "".join(one.delta.text for one in self.world.sent[self.to] if hasattr(one, "delta"))

    def commands(self, kind, name=None):
        names = [name] if name else list(self.world.commands)
        return [one for each in names for one in self.world.commands[each] if isinstance(one, kind)]


@pytest.fixture
def restarted(new_world, say_hello):
    return Restarted(new_world(), say_hello)


@pytest.mark.parametrize("first", ["worker", "client"])
def test_a_client_gets_what_it_lacks_and_the_worker_goes_on(restarted, out, first):
    if first == "worker":
        assert restarted.comes_back(running()) == [("r1", 3)]
        restarted.goes_on(out, 5, 6)
        restarted.resumes()
    else:
        restarted.resumes()
        assert restarted.comes_back(running()) == [("r1", 3)]
        restarted.goes_on(out, 5, 6)
    world, to = restarted.world, restarted.to
    assert world.tokens(to) == OUTPUT[3:6]
    assert world.core.request("r1").state is RequestState.DECODING
    restarted.goes_on(out, 6, 8, finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]
    assert restarted.texts() == TEXT[3:]
    finished = world.last(to)
    assert (finished.reason, finished.usage.completion_tokens) == (LENGTH, 8)
    budget = finished.budget
    assert sum(one.duration_us for one in budget.stages) == budget.total_us
    assert world.commands == {}
    assert world.core.stats.num_adopted == 1


def test_nobody_gets_another_tenants_output_or_its_place(restarted):
    restarted.comes_back(running(request_id="somebody/r1", tenant="somebody"))
    own = restarted.resumes(num_tokens=0)
    # It waits for a worker that can compute its prompt, as if nobody else had its id.
    assert restarted.world.kinds(own) == ["Accepted"]
    # Whose it is finds it as it was.
    restarted.resumes(num_tokens=3, tenant="somebody")
    assert restarted.world.tokens(restarted.to) == OUTPUT[3:5]
    assert restarted.world.tokens(own) == []
    assert restarted.world.core.stats.num_adopted == 1
    assert not restarted.commands(cluster_pb2.CancelCommand, "d")


def test_tenants_with_one_id_are_each_given_their_own_output(restarted, out):
    others = [900, 901, 902, 903]
    adopted = restarted.comes_back(
        running(),
        running(4, request_id="somebody/r1", tenant="somebody", token_ids=others),
    )
    assert adopted == [("r1", 3), ("somebody/r1", 3)]
    theirs = restarted.resumes(num_tokens=2, tenant="somebody", known_token_ids=others[:2])
    own = restarted.resumes(num_tokens=3)
    world = restarted.world
    assert world.tokens(theirs) == others[2:]
    assert world.tokens(own) == OUTPUT[3:5]
    world.step("d", out("somebody/r1", [904], 4, attempt=3), out("r1", [105], 5, attempt=3))
    assert world.tokens(theirs) == [902, 903, 904]
    assert world.tokens(own) == [103, 104, 105]
    assert not restarted.commands(cluster_pb2.CancelCommand)


def test_an_output_that_ended_meanwhile_is_handed_out(restarted, out):
    finished = cluster_pb2.WorkerFinished(reason=LENGTH)
    restarted.comes_back(running(8, finished=finished))
    to = restarted.resumes()
    assert restarted.world.tokens(to) == OUTPUT[3:]
    assert restarted.world.last(to).reason == LENGTH
    assert restarted.world.core.num_requests == 0


def test_it_may_end_before_its_client_is_back(restarted, out):
    restarted.comes_back(running())
    restarted.goes_on(out, 5, 8, finish=LENGTH)
    to = restarted.resumes(8)
    assert restarted.world.tokens(to) == []
    assert restarted.world.last(to).reason == LENGTH


@pytest.mark.parametrize(
    "other",
    [
        {"digest": 1},
        {"digest": request_digest(PROMPT, common_pb2.SamplingParams(max_tokens=8), "poet")},
        {"token_ids": [*OUTPUT[:2], 7, *OUTPUT[3:5]]},
        {"token_ids": OUTPUT[:2], "num_text_chars": 2, "last_text": "ab"},
        {"last_text": "e"},
    ],
    ids=["another prompt", "an adapter", "other tokens", "fewer tokens", "text that is not kept"],
)
@pytest.mark.parametrize("first", ["worker", "client"])
def test_what_is_not_the_clients_is_begun_again(restarted, out, other, first):
    world = restarted.world
    if first == "worker":
        restarted.comes_back(running(**other))
        to = restarted.resumes()
        (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
        assert (cancel.request_id, cancel.attempt) == ("r1", 3)
    else:
        to = restarted.resumes()
        assert restarted.comes_back(running(**other)) == []
    world.attach("p", PREFILL)
    world.after(1)
    (prefill,) = restarted.commands(cluster_pb2.PrefillCommand, "p")
    # Whatever the worker still says of the older attempt is nobody's.
    assert prefill.spec.attempt == 4
    restarted.goes_on(out, 5, 6)
    assert world.tokens(to) == []
    world.step("p", out("r1", [100], finish=0, attempt=4))
    restarted.goes_on(out, 3, 8, attempt=4, finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]


@pytest.mark.parametrize(
    "other",
    [{"role": PREFILL}, {"decoding": False}],
    ids=["a prompt", "no output yet"],
)
def test_only_what_decodes_goes_on(restarted, other):
    assert restarted.comes_back(running(**other)) == []


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"prompt_logprobs": 1}])
def test_log_probabilities_that_went_by_are_computed_again(restarted, sampling):
    restarted.comes_back(running(sampling=sampling))
    restarted.resumes(sampling=sampling)
    assert restarted.world.core.request("r1").state is RequestState.QUEUED


def test_nobody_comes_back(restarted, out):
    restarted.comes_back(running())
    restarted.goes_on(out, 5, 6)
    restarted.world.after(11)
    (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
    assert (cancel.request_id, cancel.attempt) == ("r1", 3)
    assert restarted.world.core.num_requests == 0


@pytest.mark.parametrize("end", ["expires", "finishes", "fails", "is lost"])
def test_what_nobody_has_come_back_for_takes_its_room_until_it_ends(restarted, out, end):
    world = restarted.world
    restarted.comes_back(running(num_prompt_tokens=1000))
    entry = world.core.placers.load(world.core.workers.by_id("d"))
    num_free = entry.free_tokens
    assert num_free <= 65536 - 1005
    assert entry.num_decodes == 1
    # Whatever the worker says meanwhile that it has.
    world.handle(ev.WorkerLoad(("d", 1), cluster_pb2.LoadReport(kv_tokens_used=1005)))
    assert entry.free_tokens == num_free
    restarted.goes_on(out, 5, 7)
    assert entry.free_tokens <= 65536 - 1007
    # It says the same again over another stream.
    restarted.comes_back(running(7, num_prompt_tokens=1000))
    assert entry.num_decodes == 1
    if end == "expires":
        world.after(11)
    elif end == "finishes":
        restarted.goes_on(out, 7, 8, finish=LENGTH)
    elif end == "fails":
        failed = cluster_pb2.RequestOutput(request_id="r1", attempt=3)
        failed.failed.message = "no"
        world.step("d", failed)
    else:
        world.handle(ev.WorkerLost("d", "was killed"))
        world.attach("d", DECODE, 2)
        entry = world.core.placers.load(world.core.workers.by_id("d"))
    world.handle(ev.WorkerLoad(("d", 1), cluster_pb2.LoadReport()))
    assert (entry.free_tokens, entry.num_decodes) == (65536, 0)


def test_who_comes_back_takes_its_room_over(restarted, out):
    world = restarted.world
    restarted.comes_back(running(num_prompt_tokens=20))
    restarted.resumes()
    entry = world.core.placers.load(world.core.workers.by_id("d"))
    assert entry.num_decodes == 1
    restarted.goes_on(out, 5, 8, finish=LENGTH)
    assert (entry.free_tokens, entry.num_decodes) == (65536, 0)


def begun_anew(restarted, out, state=RequestState.PREFILLING):
    """Resumed before its worker is back, and begun anew by workers p and d2, up to this state."""
    world = restarted.world
    world.attach("p", PREFILL)
    restarted.comes_back(name="d2")
    restarted.resumes()
    world.after(0.2)
    assert restarted.commands(cluster_pb2.PrefillCommand) == []
    world.after(0.1)
    (prefill,) = restarted.commands(cluster_pb2.PrefillCommand, "p")
    assert prefill.spec.attempt == 1
    if state is not RequestState.PREFILLING:
        world.step("p", out("r1", [100], finish=0))
    if state is RequestState.DECODING:
        restarted.goes_on(out, 3, 4, attempt=1, name="d2")
    assert world.core.request("r1").state is state


@pytest.mark.parametrize("state", [RequestState.PREFILLING, RequestState.HANDING_OFF])
def test_a_worker_that_is_late_goes_on_while_nobody_else_decodes(restarted, out, state):
    begun_anew(restarted, out, state)
    world, to = restarted.world, restarted.to
    assert restarted.comes_back(running()) == [("r1", 3)]
    for name in ("p", "d2"):
        (cancel,) = restarted.commands(cluster_pb2.CancelCommand, name)
        assert cancel.attempt == 1
    # What the others still say of it reaches nobody.
    world.step("p", out("r1", [100], finish=0))
    restarted.goes_on(out, 3, 8, attempt=1, name="d2", finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:5]
    restarted.goes_on(out, 5, 7)
    # Nor is the next attempt's number one that was used.
    world.handle(ev.WorkerLost("d", "was killed"))
    assert restarted.commands(cluster_pb2.PrefillCommand, "p")[-1].spec.attempt == 4
    world.step("p", out("r1", [100], finish=0, attempt=4))
    restarted.goes_on(out, 7, 8, attempt=4, name="d2", finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]
    assert restarted.texts() == TEXT[3:]
    budget = world.last(to).budget
    assert sum(one.duration_us for one in budget.stages) == budget.total_us
    assert world.core.stats.lanes[common_pb2.LANE_INTERACTIVE].num_running == 0


def test_a_worker_is_too_late_once_another_decodes(restarted, out):
    begun_anew(restarted, out, RequestState.DECODING)
    assert restarted.comes_back(running()) == []
    restarted.goes_on(out, 5, 8, finish=LENGTH)
    restarted.goes_on(out, 4, 8, attempt=1, name="d2", finish=LENGTH)
    assert restarted.world.tokens(restarted.to) == OUTPUT[3:]
    assert restarted.texts() == TEXT[3:]


def test_what_a_late_worker_has_is_not_taken_where_it_differs(restarted, out):
    begun_anew(restarted, out)
    assert restarted.comes_back(running(token_ids=[7] * 5)) == []
    assert not restarted.commands(cluster_pb2.CancelCommand)
    restarted.world.step("p", out("r1", [100], finish=0))
    restarted.goes_on(out, 3, 8, attempt=1, name="d2", finish=LENGTH)
    assert restarted.world.tokens(restarted.to) == OUTPUT[3:]


def test_a_new_worker_that_is_there_first_ends_nobodys_output(restarted, out):
    """Of a revision that is rolled out: the coordinator hears of it from those that come back."""
    world = restarted.world
    world.attach("p", PREFILL)
    world.attach("d2", DECODE)
    to = restarted.resumes(revision="r2")
    lost = world.submit(request_id="r9", known_token_ids=[1], revision="r2")
    assert world.kinds(to) == ["Accepted"]
    hello = restarted.hello("d", DECODE, generation=77, revision="r2")
    hello.running.append(running())
    world.handle(ev.WorkerAttached(hello, returns=True))
    assert world.tokens(to) == OUTPUT[3:5]
    restarted.goes_on(out, 5, 8, finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]
    # The last of its workers is gone before another one is back: nobody is waited for any more.
    world.handle(ev.WorkerLost("d", "was killed"))
    assert world.kinds(lost) == ["Accepted"]
    world.after(2.5)
    assert world.last(lost).error.reason == "REVISION_GONE"


def test_the_newer_of_two_attempts_goes_on(restarted, out):
    assert restarted.comes_back(running(4, attempt=2)) == [("r1", 2)]
    assert restarted.comes_back(running(5, attempt=3), name="d2") == [("r1", 3)]
    (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
    assert cancel.attempt == 2
    assert restarted.comes_back(running(4, attempt=1), name="d3") == []
    to = restarted.resumes()
    restarted.goes_on(out, 4, 8, attempt=2)
    restarted.goes_on(out, 5, 8, name="d2", finish=LENGTH)
    assert restarted.world.tokens(to) == OUTPUT[3:]


def test_an_adopted_request_survives_its_worker(restarted, out):
    world = restarted.world
    world.attach("p", PREFILL)
    restarted.comes_back(running())
    to = restarted.resumes()
    world.attach("d2", DECODE)
    world.handle(ev.WorkerLost("d", "was killed"))
    (prefill,) = restarted.commands(cluster_pb2.PrefillCommand, "p")
    assert prefill.spec.attempt == 4
    world.step("p", out("r1", [100], finish=0, attempt=4))
    restarted.goes_on(out, 5, 8, attempt=4, name="d2", finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]


def test_a_worker_lost_before_anybody_came_back(restarted):
    world = restarted.world
    world.attach("p", PREFILL)
    world.attach("d2", DECODE)
    restarted.comes_back(running())
    world.handle(ev.WorkerLost("d", "was killed"))
    restarted.resumes()
    world.after(1)
    assert len(restarted.commands(cluster_pb2.PrefillCommand, "p")) == 1


def test_a_welcome_that_was_lost_is_said_again(restarted, out):
    """The worker went on meanwhile, and its new Hello says all that it said before."""
    restarted.comes_back(running(4))
    to = restarted.resumes()
    assert restarted.world.tokens(to) == OUTPUT[3:4]
    assert restarted.comes_back(running(6)) == [("r1", 3)]
    assert restarted.world.tokens(to) == OUTPUT[3:6]
    restarted.goes_on(out, 6, 8, finish=LENGTH)
    assert restarted.world.tokens(to) == OUTPUT[3:]
    assert restarted.texts() == TEXT[3:]


@pytest.mark.parametrize("is_newer_lost", [True, False])
@pytest.mark.parametrize("comes_back_first", [True, False])
def test_what_a_worker_is_to_end_for_another_is_over(
    restarted, out, is_newer_lost, comes_back_first
):
    """It has heard no welcome: it says Hello with it again, and reads the cancel behind the next.

    Meanwhile whatever it was to end it for is gone: the newer attempt's worker, or everybody's
    recovery_timeout.
    """
    world = restarted.world
    restarted.comes_back(running(5, attempt=2))
    world.handle(ev.WorkerDetached(("d", 1)))
    if is_newer_lost:
        restarted.comes_back(running(4, attempt=3), name="d2")
        world.handle(ev.WorkerLost("d2", "was killed"))
    else:
        world.after(9.9)
        world.handle(ev.WorkerHeard(("d", 1)))
        world.after(0.2)
    (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
    assert (cancel.request_id, cancel.attempt) == ("r1", 2)
    world.attach("p", PREFILL)
    if comes_back_first:
        to = restarted.resumes()
        assert restarted.comes_back(running(5, attempt=2)) == []
    else:
        assert restarted.comes_back(running(5, attempt=2)) == []
        to = restarted.resumes()
    world.attach("d3", DECODE)
    world.after(0.5)
    # What the old attempt has said and is still on its way is nobody's.
    restarted.goes_on(out, 5, 6, attempt=2)
    prefill = restarted.commands(cluster_pb2.PrefillCommand, "p")[-1]
    assert prefill.spec.attempt == 3
    world.step("p", out("r1", [100], finish=0, attempt=3))
    decode = world.core.request("r1").decode[0]
    restarted.goes_on(out, 3, 8, attempt=3, name=decode, finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]


def test_what_was_ended_elsewhere_does_not_end_the_attempt_of_the_same_number(restarted, out):
    """Each coordinator counts from one: the one before, and the one before that, sent it out."""
    world = restarted.world
    restarted.comes_back(running(4))
    assert restarted.comes_back(running(5), name="d2") == [("r1", 3)]
    (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
    assert cancel.attempt == 3
    # Neither has heard its welcome: they say all that again.
    world.handle(ev.WorkerDetached(("d2", 1)))
    assert restarted.comes_back(running(5), name="d2") == [("r1", 3)]
    assert restarted.comes_back(running(4)) == []
    restarted.resumes()
    restarted.goes_on(out, 5, 8, name="d2", finish=LENGTH)
    assert world.tokens(restarted.to) == OUTPUT[3:]


def test_what_a_worker_is_told_to_end_is_not_taken_back(restarted, out):
    """Its connection broke before the welcome: it will read the cancel behind its next one."""
    world = restarted.world
    restarted.comes_back(running(5))
    world.handle(ev.WorkerDetached(("d", 1)))
    to = restarted.resumes()
    (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
    assert (cancel.request_id, cancel.attempt) == ("r1", 3)
    assert restarted.comes_back(running(5)) == []
    world.attach("p", PREFILL)
    world.after(0.5)
    (prefill,) = restarted.commands(cluster_pb2.PrefillCommand, "p")
    assert prefill.spec.attempt == 4
    world.step("p", out("r1", [100], finish=0, attempt=4))
    restarted.goes_on(out, 3, 8, attempt=4, finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    known=st.integers(1, 8),
    reported=st.integers(1, 8),
    sizes=st.lists(st.integers(1, 3), max_size=4),
    client_after=st.integers(0, 6),
)
def test_no_token_is_lost_or_repeated(
    new_world, say_hello, out, known, reported, sizes, client_after
):
    """A worker that reports some tokens and makes others, a client that comes at any time."""
    restarted, at = Restarted(new_world(), say_hello), reported
    world = restarted.world
    world.attach("p", PREFILL)
    finished = cluster_pb2.WorkerFinished(reason=LENGTH) if reported == 8 else None
    moves = [lambda: restarted.comes_back(running(reported, finished=finished))]
    for size in [*sizes, 8]:
        end = min(8, at + size)
        if end > at:
            finish = LENGTH if end == 8 else None
            moves.append(partial(restarted.goes_on, out, at, end, finish=finish))
            at = end
    moves.insert(min(client_after, len(moves)), lambda: restarted.resumes(known))
    for move in moves:
        move()
    world.after(1)
    # Where the worker had less than the client, the prompt is computed again.
    for prefill in restarted.commands(cluster_pb2.PrefillCommand, "p"):
        attempt = prefill.spec.attempt
        world.step("p", out("r1", [100], finish=0, attempt=attempt))
        restarted.goes_on(out, known, 8, attempt=attempt, finish=LENGTH)
    assert world.tokens(restarted.to) == OUTPUT[known:]
    assert restarted.texts() == TEXT[known:]
    assert world.last(restarted.to).reason == LENGTH
    assert world.core.num_requests == 0


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["time", "worker", "client", "prefill", "new", "old"]), max_size=24)
)
def test_whoever_is_first_no_token_is_lost_or_repeated(new_world, say_hello, out, moves):
    """The old worker and those that begin anew, at any pace; each goes on until it is told off."""
    restarted = Restarted(new_world(), say_hello)
    world, old_at, is_back = restarted.world, 5, False
    world.attach("p", PREFILL)
    world.attach("d2", DECODE)

    def told(kind, name):
        return [one for one in world.commands[name] if isinstance(one, kind)]

    def come_back():
        nonlocal is_back
        if not is_back:
            finished = cluster_pb2.WorkerFinished(reason=LENGTH) if old_at == 8 else None
            is_back = True
            restarted.comes_back(running(old_at, finished=finished))

    def go_on(name, at, attempt):
        end = min(8, at + 1)
        if end > at:
            finish = LENGTH if end == 8 else None
            restarted.goes_on(out, at, end, attempt=attempt, name=name, finish=finish)
        return end

    new_at = dict[tuple[str, int], int]()

    def prefill():
        for command in told(cluster_pb2.PrefillCommand, "p"):
            world.step("p", out("r1", [100], finish=0, attempt=command.spec.attempt))

    def decode():
        for name in ("d", "d2"):
            for command in told(cluster_pb2.DecodeCommand, name):
                attempt = command.spec.attempt
                at = new_at.get((name, attempt), len(command.spec.known_token_ids))
                new_at[name, attempt] = go_on(name, at, attempt)

    def old():
        nonlocal old_at
        old_at = go_on("d", old_at, 3) if is_back else min(8, old_at + 1)

    restarted.to = None

    def resume():
        if restarted.to is None:
            restarted.resumes(3)

    def pass_time():
        world.after(0.2)
        for worker in world.core.workers:
            world.handle(ev.WorkerHeard(worker.key))

    steps = {
        "time": pass_time,
        "worker": come_back,
        "client": resume,
        "prefill": prefill,
        "new": decode,
        "old": old,
    }
    for move in [*moves, "client", "worker", "time", "time", *["prefill", "new", "old"] * 6]:
        steps[move]()
    assert world.tokens(restarted.to) == OUTPUT[3:]
    assert restarted.texts() == TEXT[3:]
    assert world.core.num_requests == 0
