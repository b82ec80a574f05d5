"""A restarted coordinator: workers and clients come back in any order, and are joined."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.coordinator import events as ev
from baton.coordinator.request import RequestState
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


def test_those_that_come_back_wait_for_their_worker_and_not_for_ever(restarted):
    world = restarted.world
    world.attach("p", PREFILL)
    restarted.resumes()
    restarted.comes_back(name="d2")
    world.after(0.3)
    assert restarted.commands(cluster_pb2.PrefillCommand) == []
    world.after(0.2)
    assert len(restarted.commands(cluster_pb2.PrefillCommand)) == 1
    # Now it is another's.
    assert restarted.comes_back(running()) == []


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
