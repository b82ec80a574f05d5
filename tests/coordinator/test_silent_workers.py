"""Silent workers and stuck engines: when they are noticed, and where their requests move."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from tests.coordinator.two_pairs import decodes, hear_all_but, latest, pairs, prefills

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def test_requests_of_a_silent_worker_move_and_the_worker_may_return(two_pairs, out):
    to = two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    two_pairs.step(prefiller, out("r1", [7], finish=0))
    ((decoder, _),) = decodes(two_pairs)
    two_pairs.step(decoder, out("r1", [8], offset=1))
    other = "d2" if decoder == "d" else "d"
    for _ in range(5):
        two_pairs.after(0.5)
        hear_all_but(two_pairs, decoder)
    assert two_pairs.core.workers.by_id(decoder).unresponsive.startswith("was silent for 2")
    name, again = latest(prefills(two_pairs))
    assert again.handoff.target == f"{other}.test:1"
    two_pairs.step(name, out("r1", [7], finish=0, attempt=2))
    # The worker wakes up and continues its old attempt; those outputs are dropped.
    two_pairs.step(decoder, out("r1", [9], offset=2))
    two_pairs.step(decoder, out("r1", [10], offset=3, finish=STOP))
    assert two_pairs.tokens(to) == [7, 8]
    two_pairs.step(other, out("r1", [9], offset=2, finish=LENGTH, attempt=2))
    assert two_pairs.tokens(to) == [7, 8, 9]
    assert two_pairs.last(to).reason == LENGTH
    assert two_pairs.core.workers.by_id(decoder).serving
    assert not len(two_pairs.core.workers.by_id(decoder).ledger)


@pytest.mark.parametrize(("silences_s", "noticed_s"), [([], 1.33), ([0.9], 1.8), ([0.9, 1.4], 2.0)])
def test_the_silence_limit_adapts_to_each_worker(two_pairs, out, silences_s, noticed_s):
    """The limit is twice the longest recent silence of the worker, within bounds.

    The upper bound is the configured `worker_silent_s` (2 s), the lower bound two thirds of it.
    """
    for beat in range(60):
        two_pairs.after(0.5)
        report = cluster_pb2.LoadReport(num_steps=beat)
        for worker in two_pairs.core.workers:
            two_pairs.handle(ev.LoadReported(worker.key, report))
    to = two_pairs.submit()
    ((prefiller, prefill),) = prefills(two_pairs)
    two_pairs.step(prefiller, out("r1", [7], finish=0))
    decoder = "d" if prefill.handoff.target.startswith("d.") else "d2"
    for silence_s in silences_s:
        two_pairs.after(silence_s)
        hear_all_but(two_pairs)
    two_pairs.step(decoder, out("r1", [8], offset=1))
    begun_at = two_pairs.now
    while not any(one.spec.attempt == 2 for _, one in prefills(two_pairs)):
        two_pairs.after(0.05)
        hear_all_but(two_pairs, decoder)
        assert two_pairs.now < begun_at + 3
    assert two_pairs.now - begun_at == pytest.approx(noticed_s, abs=0.06)
    assert two_pairs.tokens(to) == [7, 8]


def test_a_broken_connection_is_tolerated_for_a_shorter_time_than_silence(two_pairs, out):
    two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    two_pairs.handle(ev.WorkerDetached((prefiller, 1)))
    two_pairs.after(0.4)
    # The worker reconnects within the limit, so its requests stay.
    two_pairs.attach(prefiller, PREFILL)
    two_pairs.after(0.4)
    assert two_pairs.core.request("r1").attempt == 1
    two_pairs.handle(ev.WorkerDetached((prefiller, 1)))
    two_pairs.after(0.6)
    assert two_pairs.core.request("r1").attempt == 2
    assert two_pairs.core.workers.by_id(prefiller) is not None


def test_a_stream_that_ends_is_no_sign_of_life_of_a_silent_worker(two_pairs):
    for _ in range(6):
        two_pairs.after(0.5)
        hear_all_but(two_pairs, "d")
    assert two_pairs.core.workers.by_id("d").unresponsive
    two_pairs.handle(ev.WorkerDetached(("d", 1)))
    assert two_pairs.core.workers.by_id("d").unresponsive
    # The worker is lost `worker_timeout_s` after its last sign of life, not after the end of its
    # stream.
    for _ in range(15):
        two_pairs.after(0.5)
        hear_all_but(two_pairs, "d")
    assert two_pairs.core.workers.by_id("d") is None
    assert two_pairs.core.stats.num_workers_unresponsive == 1


def test_requests_of_a_silent_worker_stay_until_another_worker_attaches(world, out):
    to = world.submit()
    for _ in range(10):
        world.after(0.5)
        hear_all_but(world, "p")
    assert world.core.request("r1").attempt == 1
    world.step("p", out("r1", [7], finish=0))
    assert world.tokens(to) == [7]
    # Another worker attaches during the silence; the request moves to it.
    world.submit()
    world.after(1.5)
    hear_all_but(world, "p")
    world.attach("p2", PREFILL)
    for _ in range(8):
        world.after(0.5)
        hear_all_but(world, "p")
    assert world.core.request("r2").prefill == ("p2", 1)


@pytest.mark.parametrize("stopped_s", [3.0, 25.0, 100.0])
def test_a_stopped_coordinator_declares_no_worker_silent(two_pairs, stopped_s, out):
    to = two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    load = cluster_pb2.LoadReport(num_steps=1, num_running=1)
    two_pairs.handle(ev.LoadReported((prefiller, 1), load))
    two_pairs.now += stopped_s
    # Overdue timers run before the messages that arrived during the stop.
    two_pairs.handle(ev.Tick())
    two_pairs.handle(ev.LoadReported((prefiller, 1), load))
    hear_all_but(two_pairs)
    assert two_pairs.core.request("r1").attempt == 1
    assert len(list(two_pairs.core.workers)) == 4
    assert all(worker.serving for worker in two_pairs.core.workers)
    two_pairs.step(prefiller, out("r1", [7], finish=0))
    assert two_pairs.tokens(to) == [7]
    # A silence after the stop is noticed as usual.
    for _ in range(6):
        two_pairs.after(0.4)
        hear_all_but(two_pairs, "d", "d2")
    assert two_pairs.core.request("r1").attempt == 2


@pytest.mark.parametrize("stopped_s", [0.7, 1.0, 1.1, 1.3, 1.4])
@pytest.mark.parametrize("reads_one_first", [False, True])
def test_a_short_stop_of_the_coordinator_declares_no_punctual_worker_silent(
    new_world, out, stopped_s, reads_one_first
):
    """These stops are too short to be noticed by overdue timers of the coordinator."""
    # The limit for punctual workers is then 1 s, as with the default configuration.
    two_pairs = pairs(new_world(worker_silent_s=1.5))
    two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    two_pairs.step(prefiller, out("r1", [7], finish=0))
    ((decoder, _),) = decodes(two_pairs)
    other = "d2" if decoder == "d" else "d"
    for beat in range(60):
        report = cluster_pb2.LoadReport(num_steps=beat)
        for worker in two_pairs.core.workers:
            two_pairs.after(0.12)
            two_pairs.handle(ev.LoadReported(worker.key, report))
    # Repeat with a different number of heartbeats, so that the timers have different phases.
    for beats in range(8):
        for _ in range(beats):
            two_pairs.after(0.12)
            hear_all_but(two_pairs)
        two_pairs.now += stopped_s
        if reads_one_first:
            two_pairs.handle(ev.WorkerHeard((other, 1)))
        two_pairs.handle(ev.Tick())
        two_pairs.after(0.01)
        hear_all_but(two_pairs)
        assert two_pairs.core.request("r1").attempt == 1
        for _ in range(60):
            two_pairs.after(0.4)
            for worker in two_pairs.core.workers:
                two_pairs.handle(ev.LoadReported(worker.key, report))
    # A silence after the stop is noticed as usual.
    begun_at = two_pairs.now
    while not two_pairs.core.workers.by_id(decoder).unresponsive:
        two_pairs.after(0.1)
        hear_all_but(two_pairs, decoder)
    assert two_pairs.now - begun_at == pytest.approx(1.0, abs=0.11)


@pytest.mark.parametrize("beat_s", [0.1, 0.11, 0.15])
def test_late_heartbeats_of_other_workers_do_not_hide_a_silence(new_world, beat_s):
    """With few workers, more than a heartbeat interval may pass without a message from any."""
    two_pairs = pairs(new_world(heartbeat_s=0.1, worker_silent_s=0.3))
    for _ in range(40):
        two_pairs.after(beat_s)
        hear_all_but(two_pairs)
    begun_at = two_pairs.now
    while not two_pairs.core.workers.by_id("d").unresponsive:
        two_pairs.after(beat_s)
        hear_all_but(two_pairs, "d")
        assert two_pairs.now < begun_at + 1
    assert two_pairs.now - begun_at < 0.3 + 2 * beat_s


def report_steps(world, name, seconds, num_steps, num_running=0):
    """Sends heartbeats of a worker for `seconds`, with a constant step count of its engine."""
    for _ in range(2 * seconds):
        world.after(0.5)
        hear_all_but(world, name)
        load = cluster_pb2.LoadReport(num_steps=num_steps, num_running=num_running)
        world.handle(ev.LoadReported((name, 1), load))


def test_an_engine_with_a_constant_step_count_is_stuck(two_pairs):
    two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    load = cluster_pb2.LoadReport(num_steps=1, num_running=1)
    two_pairs.handle(ev.LoadReported((prefiller, 1), load))
    report_steps(two_pairs, prefiller, 19, num_steps=1, num_running=1)
    assert two_pairs.core.request("r1").attempt == 1
    report_steps(two_pairs, prefiller, 2, num_steps=1, num_running=1)
    assert two_pairs.core.request("r1").attempt == 2
    assert not two_pairs.core.workers.by_id(prefiller).serving
    report_steps(two_pairs, prefiller, 1, num_steps=2, num_running=1)
    assert two_pairs.core.workers.by_id(prefiller).serving
    report_steps(two_pairs, prefiller, 65, num_steps=2, num_running=1)
    assert two_pairs.core.workers.by_id(prefiller) is None
    assert "has made no step for 60" in str(two_pairs.membership[-1].error)


def test_an_engine_that_got_stuck_while_idle_is_found_by_an_unanswered_request(two_pairs):
    """Its load reports show no running request, because they date from its last step."""
    two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    report_steps(two_pairs, prefiller, 1, num_steps=7)
    report_steps(two_pairs, prefiller, 19, num_steps=7)
    assert two_pairs.core.request("r1").attempt == 1
    report_steps(two_pairs, prefiller, 2, num_steps=7)
    assert two_pairs.core.request("r1").attempt == 2
    # The request was cancelled there; an idle engine gives no evidence that it works again.
    report_steps(two_pairs, prefiller, 10, num_steps=7)
    assert not two_pairs.core.workers.by_id(prefiller).serving
    report_steps(two_pairs, prefiller, 1, num_steps=8)
    assert two_pairs.core.workers.by_id(prefiller).serving
    report_steps(two_pairs, prefiller, 120, num_steps=8)
    assert two_pairs.core.workers.by_id(prefiller).serving
    two_pairs.submit()
    report_steps(two_pairs, latest(prefills(two_pairs))[0], 1, num_steps=8)


def test_a_stuck_engine_is_fenced_also_without_a_replacement_worker(world):
    report_steps(world, "p", 5, num_steps=7)
    world.submit()
    report_steps(world, "p", 58, num_steps=7)
    assert world.core.workers.by_id("p") is not None
    report_steps(world, "p", 3, num_steps=7)
    assert world.core.workers.by_id("p") is None
    assert "has made no step for 60" in str(world.membership[-1].error)


def test_an_engine_that_waits_for_a_kv_cache_is_not_stuck(two_pairs, out):
    two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    two_pairs.step(prefiller, out("r1", [7], finish=0))
    ((decoder, command),) = decodes(two_pairs)
    report_steps(two_pairs, decoder, 40, num_steps=3)
    assert two_pairs.core.request("r1").attempt == 1
    committed = cluster_pb2.HandoffReport(
        request_id="r1",
        handoff_id=command.handoff.handoff_id,
        state=kv_transfer_pb2.HANDOFF_STATE_COMMITTED,
    )
    two_pairs.handle(ev.WorkerHandoff((prefiller, 1), committed))
    report_steps(two_pairs, decoder, 22, num_steps=3)
    assert two_pairs.core.request("r1").attempt == 2


def test_the_stuck_limit_allows_for_the_longest_steps_of_the_latency_model(new_world):
    slow = LatencyModel(12.0, 0.0, 0.0, 0.01, 0.0, 0.0)
    two_pairs = pairs(new_world(latency=slow))
    two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    report_steps(two_pairs, prefiller, 45, num_steps=1, num_running=1)
    assert two_pairs.core.request("r1").attempt == 1
    report_steps(two_pairs, prefiller, 5, num_steps=1, num_running=1)
    assert two_pairs.core.request("r1").attempt == 2


def decoding_on(world, out):
    """Submits a request to an elastic pair, and brings it to decoding where its prompt is read.

    Returns:
        The stream, the worker that decodes, and the other worker.
    """
    to = world.submit()
    request = world.core.request(f"r{to.stream}")
    assert request.prefill is None
    name = request.decode[0]
    world.step(name, out(request.id, [7]))
    return to, name, "d" if name == "p" else "p"


def test_in_an_elastic_cell_requests_of_a_silent_worker_move_to_the_other_role(new_world, out):
    world = new_world(elastic=True).pair()
    to, silent, other = decoding_on(world, out)
    world.wait(3, silent={silent})
    request = world.core.request("r1")
    assert (request.decode, request.attempt) == ((other, 1), 2)
    assert not world.core.workers.by_id(silent).serving
    for _ in range(2):
        new = world.core.request(f"r{world.submit().stream}")
        assert (new.prefill, new.decode) == (None, (other, 1))
    world.step(other, out("r1", [8], offset=1, finish=LENGTH, attempt=2))
    assert world.tokens(to) == [7, 8]
    # The other worker is the last one now, so its requests stay when it becomes silent as well.
    world.wait(3, silent={silent, other})
    assert world.core.workers.by_id(other).serving
    assert world.core.request("r2").attempt == 1


def test_in_an_elastic_cell_requests_of_a_stuck_engine_move_to_the_other_role(new_world, out):
    world = new_world(elastic=True).pair()
    _, stuck, other = decoding_on(world, out)
    report_steps(world, stuck, 19, num_steps=1, num_running=1)
    assert world.core.request("r1").attempt == 1
    report_steps(world, stuck, 2, num_steps=1, num_running=1)
    request = world.core.request("r1")
    assert (request.decode, request.attempt) == ((other, 1), 2)
