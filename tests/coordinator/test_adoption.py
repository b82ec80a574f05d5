"""Adoption after a coordinator restart: workers and clients return in any order."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import RequestState
from baton.runtime.config import TenantConfig
from baton.runtime.names import DEFAULT_TENANT
from baton.runtime.prompts.request_digest import request_digest
from baton.v1 import cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
LENGTH = common_pb2.FINISH_REASON_LENGTH
PROMPT = list(range(20))
# Output tokens of a run without faults, and one letter of text for each token.
OUTPUT = [100 + index for index in range(8)]
TEXT = "abcdefgh"


def running(num_tokens=5, *, attempt=3, sampling=None, prompt=None, **fields):
    """Builds a worker's report of request r1; earlier coordinators made three attempts of it."""
    sampling = common_pb2.SamplingParams(**{"max_tokens": 8, **(sampling or {})})
    values = {
        "request_id": "r1",
        "attempt": attempt,
        "role": DECODE,
        "token_ids": OUTPUT[:num_tokens],
        "num_text_chars": num_tokens,
        "last_text": TEXT[:num_tokens],
        "decoding": True,
        "digest": request_digest(prompt or PROMPT, sampling),
        "tenant": DEFAULT_TENANT,
    }
    return cluster_pb2.RunningRequest(**{**values, **fields})


class RestartedCoordinator:
    """A coordinator that has just been restarted, and that no worker has attached to yet."""

    def __init__(self, world, hello) -> None:
        self.world, self.hello = world, hello

    def reattach(self, *running, name="d", incarnation=1):
        """Attaches a worker that served an earlier coordinator.

        Returns:
            (request ID, attempt) of each adopted request, with which the worker continues.
        """
        hello = self.hello(name, DECODE, incarnation, generation=77)
        hello.running.extend(running)
        self.world.handle(ev.WorkerAttached(hello, returns=True))
        welcomes = [one for one in self.world.membership if isinstance(one, ev.WelcomeWorker)]
        return [(one.request_id, one.attempt) for one in welcomes[-1].adopted]

    def resume(self, num_tokens=3, **changes):
        """The client of r1 resumes with its first tokens; returns the stream."""
        known = {"known_token_ids": OUTPUT[:num_tokens], "known_text_chars": num_tokens}
        self.to = self.world.submit(request_id="r1", **{**known, **changes})
        return self.to

    def report(self, out, begin, end, *, attempt=3, finish=None, name="d"):
        """A worker reports the output tokens from `begin` to `end`."""
        text = TEXT[begin:end]
        self.world.step(
            name, out("r1", OUTPUT[begin:end], begin, text, finish=finish, attempt=attempt)
        )

    def received_text(self):
        return "".join(one.delta.text for one in self.world.sent[self.to] if hasattr(one, "delta"))

    def commands(self, kind, name=None):
        names = [name] if name else list(self.world.commands)
        return [one for each in names for one in self.world.commands[each] if isinstance(one, kind)]


@pytest.fixture
def restarted(new_world, say_hello):
    return RestartedCoordinator(new_world(), say_hello)


@pytest.mark.parametrize("first", ["worker", "client"])
def test_a_client_gets_its_missing_tokens_and_the_worker_continues(restarted, out, first):
    if first == "worker":
        assert restarted.reattach(running()) == [("r1", 3)]
        restarted.report(out, 5, 6)
        restarted.resume()
    else:
        restarted.resume()
        assert restarted.reattach(running()) == [("r1", 3)]
        restarted.report(out, 5, 6)
    world, to = restarted.world, restarted.to
    assert world.tokens(to) == OUTPUT[3:6]
    assert world.core.request("r1").state is RequestState.DECODING
    restarted.report(out, 6, 8, finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]
    assert restarted.received_text() == TEXT[3:]
    finished = world.last(to)
    assert (finished.reason, finished.usage.completion_tokens) == (LENGTH, 8)
    budget = finished.budget
    assert sum(one.duration_us for one in budget.stages) == budget.total_us
    assert world.commands == {}
    assert world.core.stats.num_adopted == 1


def test_the_outputs_in_a_hello_are_not_kept(restarted):
    labels = {"host": "a"}
    for incarnation in (1, 1, 2):
        hello = restarted.hello("d", DECODE, incarnation, generation=77, labels=labels)
        hello.running.append(running())
        restarted.world.handle(ev.WorkerAttached(hello, returns=True))
        kept = restarted.world.core.workers.by_id("d").hello
        assert kept == restarted.hello("d", DECODE, incarnation, generation=77, labels=labels)


def test_an_early_request_reserves_no_more_tokens_than_the_context_has(new_world):
    world = new_world(tenants={"a": TenantConfig(tokens_per_s=1, burst_tokens=1200)})
    early = world.submit(
        request_id="r1",
        tenant="a",
        known_token_ids=OUTPUT[:3],
        known_text_chars=3,
        sampling={"max_tokens": 10**9},
    )
    assert world.kinds(early) == ["Accepted"]
    world.pair()
    assert world.core.request("r1", "a").submission.sampling.max_tokens == 1004
    # The context of 1,024 tokens is reserved, so 176 are left.
    large, small = (world.submit(tenant="a", num_prompt=number) for number in (200, 100))
    assert world.last(large).error.reason == "TENANT_RATE"
    assert world.kinds(small) == ["Accepted"]


def test_an_early_request_gets_the_output_that_runs_in_another_revision(restarted):
    """Its max_tokens is cut at the context of the worker that runs it."""
    restarted.resume(sampling={"max_tokens": 2000})
    hello = restarted.hello("d", DECODE, 1, generation=77, revision="r2")
    hello.running.append(running(sampling={"max_tokens": 1004}))
    restarted.world.handle(ev.WorkerAttached(hello, returns=True))
    assert restarted.world.core.stats.num_adopted == 1
    assert restarted.world.tokens(restarted.to) == OUTPUT[3:5]
    assert restarted.world.core.request("r1").submission.sampling.max_tokens == 1004


def test_a_tenant_gets_no_output_of_another_tenant_with_the_same_request_id(restarted):
    restarted.reattach(running(request_id="somebody/r1", tenant="somebody"))
    own = restarted.resume(num_tokens=0)
    # The request waits for a prefill worker, as if no other tenant used its ID.
    assert restarted.world.kinds(own) == ["Accepted"]
    # The tenant that owns the output still gets it.
    restarted.resume(num_tokens=3, tenant="somebody")
    assert restarted.world.tokens(restarted.to) == OUTPUT[3:5]
    assert restarted.world.tokens(own) == []
    assert restarted.world.core.stats.num_adopted == 1
    assert not restarted.commands(cluster_pb2.CancelCommand, "d")


def test_two_tenants_with_the_same_request_id_each_get_their_own_output(restarted, out):
    others = [900, 901, 902, 903]
    adopted = restarted.reattach(
        running(),
        running(4, request_id="somebody/r1", tenant="somebody", token_ids=others),
    )
    assert adopted == [("r1", 3), ("somebody/r1", 3)]
    theirs = restarted.resume(num_tokens=2, tenant="somebody", known_token_ids=others[:2])
    own = restarted.resume(num_tokens=3)
    world = restarted.world
    assert world.tokens(theirs) == others[2:]
    assert world.tokens(own) == OUTPUT[3:5]
    world.step("d", out("somebody/r1", [904], 4, attempt=3), out("r1", [105], 5, attempt=3))
    assert world.tokens(theirs) == [902, 903, 904]
    assert world.tokens(own) == [103, 104, 105]
    assert not restarted.commands(cluster_pb2.CancelCommand)


def test_an_output_that_ended_without_a_coordinator_is_delivered(restarted, out):
    finished = cluster_pb2.WorkerFinished(reason=LENGTH)
    restarted.reattach(running(8, finished=finished))
    to = restarted.resume()
    assert restarted.world.tokens(to) == OUTPUT[3:]
    assert restarted.world.last(to).reason == LENGTH
    assert restarted.world.core.num_requests == 0


def test_an_adopted_output_may_end_before_its_client_returns(restarted, out):
    restarted.reattach(running())
    restarted.report(out, 5, 8, finish=LENGTH)
    to = restarted.resume(8)
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
def test_an_output_that_differs_from_the_clients_request_is_computed_again(
    restarted, out, other, first
):
    world = restarted.world
    if first == "worker":
        restarted.reattach(running(**other))
        to = restarted.resume()
        (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
        assert (cancel.request_id, cancel.attempt) == ("r1", 3)
    else:
        to = restarted.resume()
        assert restarted.reattach(running(**other)) == []
    world.attach("p", PREFILL)
    world.after(1)
    (prefill,) = restarted.commands(cluster_pb2.PrefillCommand, "p")
    # Later outputs of the older attempt are dropped.
    assert prefill.spec.attempt == 4
    restarted.report(out, 5, 6)
    assert world.tokens(to) == []
    world.step("p", out("r1", [100], finish=0, attempt=4))
    restarted.report(out, 3, 8, attempt=4, finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]


@pytest.mark.parametrize(
    "other",
    [{"role": PREFILL}, {"decoding": False}],
    ids=["a prompt", "no output yet"],
)
def test_only_decodes_with_output_are_adopted(restarted, other):
    assert restarted.reattach(running(**other)) == []


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"prompt_logprobs": 1}])
def test_outputs_with_log_probabilities_are_computed_again(restarted, sampling):
    restarted.reattach(running(sampling=sampling))
    restarted.resume(sampling=sampling)
    assert restarted.world.core.request("r1").state is RequestState.QUEUED


def test_an_adopted_output_is_cancelled_if_its_client_does_not_return(restarted, out):
    restarted.reattach(running())
    restarted.report(out, 5, 6)
    restarted.world.after(11)
    (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
    assert (cancel.request_id, cancel.attempt) == ("r1", 3)
    assert restarted.world.core.num_requests == 0


@pytest.mark.parametrize("end", ["expires", "finishes", "fails", "is lost"])
def test_an_adopted_output_without_a_client_keeps_its_reservation_until_it_ends(
    restarted, out, end
):
    world = restarted.world
    restarted.reattach(running(num_prompt_tokens=1000))
    entry = world.core.placers.load(world.core.workers.by_id("d"))
    free_before = entry.free_tokens
    assert free_before <= 65536 - 1005
    assert entry.num_decodes == 1
    # Load reports of the worker do not change the reservation.
    world.handle(ev.LoadReported(("d", 1), cluster_pb2.LoadReport(kv_tokens_used=1005)))
    assert entry.free_tokens == free_before
    restarted.report(out, 5, 7)
    assert entry.free_tokens <= 65536 - 1007
    # The worker reports the same attempt again over another stream.
    restarted.reattach(running(7, num_prompt_tokens=1000))
    assert entry.num_decodes == 1
    if end == "expires":
        world.after(11)
    elif end == "finishes":
        restarted.report(out, 7, 8, finish=LENGTH)
    elif end == "fails":
        failed = cluster_pb2.RequestOutput(request_id="r1", attempt=3)
        failed.failed.message = "no"
        world.step("d", failed)
    else:
        world.handle(ev.WorkerLost("d", "was killed"))
        world.attach("d", DECODE, 2)
        entry = world.core.placers.load(world.core.workers.by_id("d"))
    world.handle(ev.LoadReported(("d", 1), cluster_pb2.LoadReport()))
    assert (entry.free_tokens, entry.num_decodes) == (65536, 0)


def test_a_returning_client_takes_over_the_reservation(restarted, out):
    world = restarted.world
    restarted.reattach(running(num_prompt_tokens=20))
    restarted.resume()
    entry = world.core.placers.load(world.core.workers.by_id("d"))
    assert entry.num_decodes == 1
    restarted.report(out, 5, 8, finish=LENGTH)
    assert (entry.free_tokens, entry.num_decodes) == (65536, 0)


def begun_anew(restarted, out, state=RequestState.PREFILLING):
    """Resumes r1 before its worker reattaches; workers p and d2 start it anew, up to `state`."""
    world = restarted.world
    world.attach("p", PREFILL)
    restarted.reattach(name="d2")
    restarted.resume()
    world.after(0.2)
    assert restarted.commands(cluster_pb2.PrefillCommand) == []
    world.after(0.1)
    (prefill,) = restarted.commands(cluster_pb2.PrefillCommand, "p")
    assert prefill.spec.attempt == 1
    if state is not RequestState.PREFILLING:
        world.step("p", out("r1", [100], finish=0))
    if state is RequestState.DECODING:
        restarted.report(out, 3, 4, attempt=1, name="d2")
    assert world.core.request("r1").state is state


@pytest.mark.parametrize("is_adopted", [True, False], ids=["adopted", "begun anew"])
def test_a_resumed_output_has_no_second_first_token(restarted, out, is_adopted):
    """The coordinator before the restart counted its time to first token."""
    if is_adopted:
        restarted.reattach(running())
        restarted.resume()
        restarted.report(out, 5, 8, finish=LENGTH)
    else:
        begun_anew(restarted, out, RequestState.DECODING)
        restarted.report(out, 4, 8, attempt=1, finish=LENGTH, name="d2")
    stats = restarted.world.core.stats
    (lane,) = [one for one in stats.lanes.values() if sum(one.e2e.counts)]
    assert sum(lane.ttft.counts) == sum(lane.ttft_ratio.counts) == 0
    assert not any(one.first_tokens for one in stats.demand.values())


@pytest.mark.parametrize("state", [RequestState.PREFILLING, RequestState.HANDING_OFF])
def test_a_late_worker_continues_if_no_other_worker_decodes_yet(restarted, out, state):
    begun_anew(restarted, out, state)
    world, to = restarted.world, restarted.to
    assert restarted.reattach(running()) == [("r1", 3)]
    for name in ("p", "d2"):
        (cancel,) = restarted.commands(cluster_pb2.CancelCommand, name)
        assert cancel.attempt == 1
    # Later outputs of the cancelled attempt are dropped.
    world.step("p", out("r1", [100], finish=0))
    restarted.report(out, 3, 8, attempt=1, name="d2", finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:5]
    restarted.report(out, 5, 7)
    # The next attempt gets a number that was never used.
    world.handle(ev.WorkerLost("d", "was killed"))
    assert restarted.commands(cluster_pb2.PrefillCommand, "p")[-1].spec.attempt == 4
    world.step("p", out("r1", [100], finish=0, attempt=4))
    restarted.report(out, 7, 8, attempt=4, name="d2", finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]
    assert restarted.received_text() == TEXT[3:]
    budget = world.last(to).budget
    assert sum(one.duration_us for one in budget.stages) == budget.total_us
    assert world.core.num_running(common_pb2.LANE_INTERACTIVE) == 0


def test_a_late_worker_is_not_adopted_once_another_worker_decodes(restarted, out):
    begun_anew(restarted, out, RequestState.DECODING)
    assert restarted.reattach(running()) == []
    restarted.report(out, 5, 8, finish=LENGTH)
    restarted.report(out, 4, 8, attempt=1, name="d2", finish=LENGTH)
    assert restarted.world.tokens(restarted.to) == OUTPUT[3:]
    assert restarted.received_text() == TEXT[3:]


def test_a_late_worker_with_other_tokens_is_not_adopted(restarted, out):
    begun_anew(restarted, out)
    assert restarted.reattach(running(token_ids=[7] * 5)) == []
    assert not restarted.commands(cluster_pb2.CancelCommand)
    restarted.world.step("p", out("r1", [100], finish=0))
    restarted.report(out, 3, 8, attempt=1, name="d2", finish=LENGTH)
    assert restarted.world.tokens(restarted.to) == OUTPUT[3:]


def test_a_request_of_a_canary_revision_waits_for_its_workers_to_reattach(restarted, out):
    """A request of a canary revision waits for a worker of that revision.

    The restarted coordinator learns of the revision only from workers that reattach.
    """
    world = restarted.world
    world.attach("p", PREFILL)
    world.attach("d2", DECODE)
    to = restarted.resume(revision="r2")
    lost = world.submit(request_id="r9", known_token_ids=[1], revision="r2")
    assert world.kinds(to) == ["Accepted"]
    hello = restarted.hello("d", DECODE, generation=77, revision="r2")
    hello.running.append(running())
    world.handle(ev.WorkerAttached(hello, returns=True))
    assert world.tokens(to) == OUTPUT[3:5]
    restarted.report(out, 5, 8, finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]
    # The last worker of the revision is lost, so the other request fails after a short wait.
    world.handle(ev.WorkerLost("d", "was killed"))
    assert world.kinds(lost) == ["Accepted"]
    world.after(2.5)
    assert world.last(lost).error.reason == "REVISION_GONE"


def test_the_newer_of_two_attempts_is_adopted(restarted, out):
    assert restarted.reattach(running(4, attempt=2)) == [("r1", 2)]
    assert restarted.reattach(running(5, attempt=3), name="d2") == [("r1", 3)]
    (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
    assert cancel.attempt == 2
    assert restarted.reattach(running(4, attempt=1), name="d3") == []
    to = restarted.resume()
    restarted.report(out, 4, 8, attempt=2)
    restarted.report(out, 5, 8, name="d2", finish=LENGTH)
    assert restarted.world.tokens(to) == OUTPUT[3:]


def test_an_adopted_request_survives_its_worker(restarted, out):
    world = restarted.world
    world.attach("p", PREFILL)
    restarted.reattach(running())
    to = restarted.resume()
    world.attach("d2", DECODE)
    world.handle(ev.WorkerLost("d", "was killed"))
    (prefill,) = restarted.commands(cluster_pb2.PrefillCommand, "p")
    assert prefill.spec.attempt == 4
    world.step("p", out("r1", [100], finish=0, attempt=4))
    restarted.report(out, 5, 8, attempt=4, name="d2", finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]


def test_an_output_whose_worker_is_lost_before_its_client_returns_is_computed_again(restarted):
    world = restarted.world
    world.attach("p", PREFILL)
    world.attach("d2", DECODE)
    restarted.reattach(running())
    world.handle(ev.WorkerLost("d", "was killed"))
    restarted.resume()
    world.after(1)
    assert len(restarted.commands(cluster_pb2.PrefillCommand, "p")) == 1


def test_a_lost_welcome_is_repeated(restarted, out):
    """The worker continued meanwhile; its new Hello repeats its earlier report with more tokens."""
    restarted.reattach(running(4))
    to = restarted.resume()
    assert restarted.world.tokens(to) == OUTPUT[3:4]
    assert restarted.reattach(running(6)) == [("r1", 3)]
    assert restarted.world.tokens(to) == OUTPUT[3:6]
    restarted.report(out, 6, 8, finish=LENGTH)
    assert restarted.world.tokens(to) == OUTPUT[3:]
    assert restarted.received_text() == TEXT[3:]


@pytest.mark.parametrize("newer_worker_lost", [True, False])
@pytest.mark.parametrize("client_first", [True, False])
def test_a_cancelled_attempt_is_not_adopted_after_its_reason_is_over(
    restarted, out, newer_worker_lost, client_first
):
    """The worker repeats a cancelled attempt in its next Hello, because it got no Welcome before.

    The worker reads the CancelCommand after its next Welcome. Meanwhile the reason for the cancel
    is over: the worker of the newer attempt was lost, or the time for clients to return expired.
    """
    world = restarted.world
    restarted.reattach(running(5, attempt=2))
    world.handle(ev.WorkerDetached(("d", 1)))
    if newer_worker_lost:
        restarted.reattach(running(4, attempt=3), name="d2")
        world.handle(ev.WorkerLost("d2", "was killed"))
    else:
        world.after(9.9)
        world.handle(ev.WorkerHeard(("d", 1)))
        world.after(0.2)
    (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
    assert (cancel.request_id, cancel.attempt) == ("r1", 2)
    world.attach("p", PREFILL)
    if client_first:
        to = restarted.resume()
        assert restarted.reattach(running(5, attempt=2)) == []
    else:
        assert restarted.reattach(running(5, attempt=2)) == []
        to = restarted.resume()
    world.attach("d3", DECODE)
    world.after(0.5)
    # Outputs of the old attempt that were in flight are dropped.
    restarted.report(out, 5, 6, attempt=2)
    prefill = restarted.commands(cluster_pb2.PrefillCommand, "p")[-1]
    assert prefill.spec.attempt == 3
    world.step("p", out("r1", [100], finish=0, attempt=3))
    decode = world.core.request("r1").decode[0]
    restarted.report(out, 3, 8, attempt=3, name=decode, finish=LENGTH)
    assert world.tokens(to) == OUTPUT[3:]


def test_a_cancel_on_one_worker_does_not_end_the_same_attempt_number_on_another(restarted, out):
    """Two earlier coordinators each made an attempt 3, because each counts attempts from 1."""
    world = restarted.world
    restarted.reattach(running(4))
    assert restarted.reattach(running(5), name="d2") == [("r1", 3)]
    (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
    assert cancel.attempt == 3
    # Both workers missed their Welcome, and repeat their reports.
    world.handle(ev.WorkerDetached(("d2", 1)))
    assert restarted.reattach(running(5), name="d2") == [("r1", 3)]
    assert restarted.reattach(running(4)) == []
    restarted.resume()
    restarted.report(out, 5, 8, name="d2", finish=LENGTH)
    assert world.tokens(restarted.to) == OUTPUT[3:]


def test_an_attempt_cancelled_before_the_welcome_is_not_adopted(restarted, out):
    """The connection broke before the Welcome; the worker reads the cancel after its next one."""
    world = restarted.world
    restarted.reattach(running(5))
    world.handle(ev.WorkerDetached(("d", 1)))
    to = restarted.resume()
    (cancel,) = restarted.commands(cluster_pb2.CancelCommand, "d")
    assert (cancel.request_id, cancel.attempt) == ("r1", 3)
    assert restarted.reattach(running(5)) == []
    world.attach("p", PREFILL)
    world.after(0.5)
    (prefill,) = restarted.commands(cluster_pb2.PrefillCommand, "p")
    assert prefill.spec.attempt == 4
    world.step("p", out("r1", [100], finish=0, attempt=4))
    restarted.report(out, 3, 8, attempt=4, finish=LENGTH)
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
    """The worker reports some tokens and computes the rest; the client returns at any time."""
    restarted, at = RestartedCoordinator(new_world(), say_hello), reported
    world = restarted.world
    world.attach("p", PREFILL)
    finished = cluster_pb2.WorkerFinished(reason=LENGTH) if reported == 8 else None
    moves = [lambda: restarted.reattach(running(reported, finished=finished))]
    for size in [*sizes, 8]:
        end = min(8, at + size)
        if end > at:
            finish = LENGTH if end == 8 else None
            moves.append(partial(restarted.report, out, at, end, finish=finish))
            at = end
    moves.insert(min(client_after, len(moves)), lambda: restarted.resume(known))
    for move in moves:
        move()
    world.after(1)
    # If the worker had fewer tokens than the client, the prompt is computed again.
    for prefill in restarted.commands(cluster_pb2.PrefillCommand, "p"):
        attempt = prefill.spec.attempt
        world.step("p", out("r1", [100], finish=0, attempt=attempt))
        restarted.report(out, known, 8, attempt=attempt, finish=LENGTH)
    assert world.tokens(restarted.to) == OUTPUT[known:]
    assert restarted.received_text() == TEXT[known:]
    assert world.last(restarted.to).reason == LENGTH
    assert world.core.num_requests == 0


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(["time", "worker", "client", "prefill", "new", "old"]), max_size=24)
)
def test_no_token_is_lost_or_repeated_between_old_and_new_workers(new_world, say_hello, out, moves):
    """The old worker and new workers progress at any pace; each continues until it is cancelled."""
    restarted = RestartedCoordinator(new_world(), say_hello)
    world, old_at, is_attached = restarted.world, 5, False
    world.attach("p", PREFILL)
    world.attach("d2", DECODE)

    def told(kind, name):
        return [one for one in world.commands[name] if isinstance(one, kind)]

    def reattach():
        nonlocal is_attached
        if not is_attached:
            finished = cluster_pb2.WorkerFinished(reason=LENGTH) if old_at == 8 else None
            is_attached = True
            restarted.reattach(running(old_at, finished=finished))

    def report_next(name, at, attempt):
        end = min(8, at + 1)
        if end > at:
            finish = LENGTH if end == 8 else None
            restarted.report(out, at, end, attempt=attempt, name=name, finish=finish)
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
                new_at[name, attempt] = report_next(name, at, attempt)

    def old():
        nonlocal old_at
        old_at = report_next("d", old_at, 3) if is_attached else min(8, old_at + 1)

    restarted.to = None

    def resume():
        if restarted.to is None:
            restarted.resume(3)

    def pass_time():
        world.after(0.2)
        for worker in world.core.workers:
            world.handle(ev.WorkerHeard(worker.key))

    steps = {
        "time": pass_time,
        "worker": reattach,
        "client": resume,
        "prefill": prefill,
        "new": decode,
        "old": old,
    }
    for move in [*moves, "client", "worker", "time", "time", *["prefill", "new", "old"] * 6]:
        steps[move]()
    assert world.tokens(restarted.to) == OUTPUT[3:]
    assert restarted.received_text() == TEXT[3:]
    assert world.core.num_requests == 0
