"""A worker that is silent or stuck: when that is noticed, and what becomes of its requests."""

from __future__ import annotations

import pytest
from two_pairs import decodes, latest, pairs, prefills, silent_but

from baton.coordinator.state import events as ev
from baton.runtime.latency import LatencyModel
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def test_a_silent_workers_requests_move_and_it_comes_back(two_pairs, out):
    to = two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    two_pairs.step(prefiller, out("r1", [7], finish=0))
    ((decoder, _),) = decodes(two_pairs)
    two_pairs.step(decoder, out("r1", [8], offset=1))
    other = "d2" if decoder == "d" else "d"
    for _ in range(5):
        two_pairs.after(0.5)
        silent_but(two_pairs, decoder)
    assert two_pairs.core.workers.by_id(decoder).unresponsive.startswith("was silent for 2")
    name, again = latest(prefills(two_pairs))
    assert again.handoff.target == f"{other}.test:1"
    two_pairs.step(name, out("r1", [7], finish=0, attempt=2))
    # It wakes up, and goes on with what it had: nobody hears that.
    two_pairs.step(decoder, out("r1", [9], offset=2))
    two_pairs.step(decoder, out("r1", [10], offset=3, finish=STOP))
    assert two_pairs.tokens(to) == [7, 8]
    two_pairs.step(other, out("r1", [9], offset=2, finish=LENGTH, attempt=2))
    assert two_pairs.tokens(to) == [7, 8, 9]
    assert two_pairs.last(to).reason == LENGTH
    assert two_pairs.core.workers.by_id(decoder).serving
    assert not len(two_pairs.core.workers.by_id(decoder).ledger)


@pytest.mark.parametrize(("silences_s", "noticed_s"), [([], 1.33), ([0.9], 1.8), ([0.9, 1.4], 2.0)])
def test_what_silence_is_unusual_is_learned_worker_by_worker(two_pairs, out, silences_s, noticed_s):
    """2 s are configured, and two thirds of that are the least.

    A worker that was late lately gets twice its longest silence.
    """
    for beat in range(60):
        two_pairs.after(0.5)
        report = cluster_pb2.LoadReport(num_steps=beat)
        for worker in two_pairs.core.workers:
            two_pairs.handle(ev.WorkerLoad(worker.key, report))
    to = two_pairs.submit()
    ((prefiller, prefill),) = prefills(two_pairs)
    two_pairs.step(prefiller, out("r1", [7], finish=0))
    decoder = "d" if prefill.handoff.target.startswith("d.") else "d2"
    for silence_s in silences_s:
        two_pairs.after(silence_s)
        silent_but(two_pairs)
    two_pairs.step(decoder, out("r1", [8], offset=1))
    begun_at = two_pairs.now
    while not any(one.spec.attempt == 2 for _, one in prefills(two_pairs)):
        two_pairs.after(0.05)
        silent_but(two_pairs, decoder)
        assert two_pairs.now < begun_at + 3
    assert two_pairs.now - begun_at == pytest.approx(noticed_s, abs=0.06)
    assert two_pairs.tokens(to) == [7, 8]


def test_a_broken_connection_is_waited_for_less_than_silence(two_pairs, out):
    two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    two_pairs.handle(ev.WorkerDetached((prefiller, 1)))
    two_pairs.after(0.4)
    # Back in time: nothing moves.
    two_pairs.attach(prefiller, PREFILL)
    two_pairs.after(0.4)
    assert two_pairs.core.request("r1").attempt == 1
    two_pairs.handle(ev.WorkerDetached((prefiller, 1)))
    two_pairs.after(0.6)
    assert two_pairs.core.request("r1").attempt == 2
    assert two_pairs.core.workers.by_id(prefiller) is not None


def test_the_end_of_a_silent_workers_stream_is_no_sign_of_life(two_pairs):
    for _ in range(6):
        two_pairs.after(0.5)
        silent_but(two_pairs, "d")
    assert two_pairs.core.workers.by_id("d").unresponsive
    two_pairs.handle(ev.WorkerDetached(("d", 1)))
    assert two_pairs.core.workers.by_id("d").unresponsive
    # Lost when it has been silent for long enough, not when it has been gone for so long.
    for _ in range(15):
        two_pairs.after(0.5)
        silent_but(two_pairs, "d")
    assert two_pairs.core.workers.by_id("d") is None
    assert two_pairs.core.stats.num_workers_unresponsive == 1


def test_a_silent_worker_without_another_is_waited_for(world, out):
    to = world.submit()
    for _ in range(10):
        world.after(0.5)
        silent_but(world, "p")
    assert world.core.request("r1").attempt == 1
    world.step("p", out("r1", [7], finish=0))
    assert world.tokens(to) == [7]
    # Another comes while it is silent: the request moves then.
    world.submit()
    world.after(1.5)
    silent_but(world, "p")
    world.attach("p2", PREFILL)
    for _ in range(8):
        world.after(0.5)
        silent_but(world, "p")
    assert world.core.request("r2").prefill == ("p2", 1)


@pytest.mark.parametrize("stood_still_s", [3.0, 25.0, 100.0])
def test_a_coordinator_that_stood_still_blames_no_worker(two_pairs, stood_still_s, out):
    to = two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    load = cluster_pb2.LoadReport(num_steps=1, num_running=1)
    two_pairs.handle(ev.WorkerLoad((prefiller, 1), load))
    two_pairs.now += stood_still_s
    # Timers come first; what the workers said meanwhile is read after them.
    two_pairs.handle(ev.Tick())
    two_pairs.handle(ev.WorkerLoad((prefiller, 1), load))
    silent_but(two_pairs)
    assert two_pairs.core.request("r1").attempt == 1
    assert len(list(two_pairs.core.workers)) == 4
    assert all(worker.serving for worker in two_pairs.core.workers)
    two_pairs.step(prefiller, out("r1", [7], finish=0))
    assert two_pairs.tokens(to) == [7]
    # Whoever is silent from then on is noticed as ever.
    for _ in range(6):
        two_pairs.after(0.4)
        silent_but(two_pairs, "d", "d2")
    assert two_pairs.core.request("r1").attempt == 2


@pytest.mark.parametrize("stood_still_s", [0.7, 1.0, 1.1, 1.3, 1.4])
@pytest.mark.parametrize("reads_one_first", [False, True])
def test_a_moment_of_its_own_is_no_silence_of_punctual_workers(
    new_world, out, stood_still_s, reads_one_first
):
    """Shorter than what tells by overdue timers that the coordinator itself stood still."""
    # Of the punctual it is 1 s, as with the configuration's defaults.
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
            two_pairs.handle(ev.WorkerLoad(worker.key, report))
    # Whatever the timers are set to.
    for beats in range(8):
        for _ in range(beats):
            two_pairs.after(0.12)
            silent_but(two_pairs)
        two_pairs.now += stood_still_s
        if reads_one_first:
            two_pairs.handle(ev.WorkerHeard((other, 1)))
        two_pairs.handle(ev.Tick())
        two_pairs.after(0.01)
        silent_but(two_pairs)
        assert two_pairs.core.request("r1").attempt == 1
        for _ in range(60):
            two_pairs.after(0.4)
            for worker in two_pairs.core.workers:
                two_pairs.handle(ev.WorkerLoad(worker.key, report))
    # Whoever is silent from then on is noticed as ever.
    begun_at = two_pairs.now
    while not two_pairs.core.workers.by_id(decoder).unresponsive:
        two_pairs.after(0.1)
        silent_but(two_pairs, decoder)
    assert two_pairs.now - begun_at == pytest.approx(1.0, abs=0.11)


@pytest.mark.parametrize("beat_s", [0.1, 0.11, 0.15])
def test_heartbeats_that_are_late_hide_no_silence(new_world, beat_s):
    """Of a few workers there may be a heartbeat's time, and more, in which nobody is heard."""
    two_pairs = pairs(new_world(heartbeat_s=0.1, worker_silent_s=0.3))
    for _ in range(40):
        two_pairs.after(beat_s)
        silent_but(two_pairs)
    begun_at = two_pairs.now
    while not two_pairs.core.workers.by_id("d").unresponsive:
        two_pairs.after(beat_s)
        silent_but(two_pairs, "d")
        assert two_pairs.now < begun_at + 1
    assert two_pairs.now - begun_at < 0.3 + 2 * beat_s


def test_a_stuck_engine_is_told_by_its_steps(two_pairs):
    two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)

    def report(num_steps, num_running=1):
        load = cluster_pb2.LoadReport(num_steps=num_steps, num_running=num_running)
        two_pairs.handle(ev.WorkerLoad((prefiller, 1), load))

    def beats(count, num_steps):
        for _ in range(count):
            two_pairs.after(0.5)
            silent_but(two_pairs, prefiller)
            report(num_steps)

    report(1)
    beats(38, num_steps=1)
    assert two_pairs.core.request("r1").attempt == 1
    beats(3, num_steps=1)
    assert two_pairs.core.request("r1").attempt == 2
    assert not two_pairs.core.workers.by_id(prefiller).serving
    beats(1, num_steps=2)
    assert two_pairs.core.workers.by_id(prefiller).serving
    beats(130, num_steps=2)
    assert two_pairs.core.workers.by_id(prefiller) is None
    assert "has made no step for 60" in str(two_pairs.membership[-1].error)


def beats(world, name, seconds, num_steps, num_running=0):
    """A worker gives signs of life, and says the same of its engine all the time."""
    for _ in range(2 * seconds):
        world.after(0.5)
        silent_but(world, name)
        load = cluster_pb2.LoadReport(num_steps=num_steps, num_running=num_running)
        world.handle(ev.WorkerLoad((name, 1), load))


def test_an_engine_that_stopped_while_it_was_idle_is_told_by_what_it_does_not_answer(two_pairs):
    """It says what ran when it made its last step: nothing."""
    two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    beats(two_pairs, prefiller, 1, num_steps=7)
    beats(two_pairs, prefiller, 19, num_steps=7)
    assert two_pairs.core.request("r1").attempt == 1
    beats(two_pairs, prefiller, 2, num_steps=7)
    assert two_pairs.core.request("r1").attempt == 2
    # It is told to forget the request, and has nothing to do: that shows nothing.
    beats(two_pairs, prefiller, 10, num_steps=7)
    assert not two_pairs.core.workers.by_id(prefiller).serving
    beats(two_pairs, prefiller, 1, num_steps=8)
    assert two_pairs.core.workers.by_id(prefiller).serving
    beats(two_pairs, prefiller, 120, num_steps=8)
    assert two_pairs.core.workers.by_id(prefiller).serving
    two_pairs.submit()
    beats(two_pairs, latest(prefills(two_pairs))[0], 1, num_steps=8)


def test_an_engine_that_stays_stopped_is_fenced_also_where_nobody_takes_its_requests(world):
    beats(world, "p", 5, num_steps=7)
    world.submit()
    beats(world, "p", 58, num_steps=7)
    assert world.core.workers.by_id("p") is not None
    beats(world, "p", 3, num_steps=7)
    assert world.core.workers.by_id("p") is None
    assert "has made no step for 60" in str(world.membership[-1].error)


def test_an_engine_that_waits_for_a_kv_cache_is_not_stuck(two_pairs, out):
    two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    two_pairs.step(prefiller, out("r1", [7], finish=0))
    ((decoder, command),) = decodes(two_pairs)
    beats(two_pairs, decoder, 40, num_steps=3)
    assert two_pairs.core.request("r1").attempt == 1
    committed = cluster_pb2.HandoffReport(
        request_id="r1",
        handoff_id=command.handoff.handoff_id,
        state=kv_transfer_pb2.HANDOFF_STATE_COMMITTED,
    )
    two_pairs.handle(ev.WorkerHandoff((prefiller, 1), committed))
    beats(two_pairs, decoder, 22, num_steps=3)
    assert two_pairs.core.request("r1").attempt == 2


def test_an_engine_may_take_as_long_as_its_longest_steps_do(new_world):
    slow = LatencyModel(12.0, 0.0, 0.0, 0.01, 0.0, 0.0)
    two_pairs = pairs(new_world(latency=slow))
    two_pairs.submit()
    ((prefiller, _),) = prefills(two_pairs)
    beats(two_pairs, prefiller, 45, num_steps=1, num_running=1)
    assert two_pairs.core.request("r1").attempt == 1
    beats(two_pairs, prefiller, 5, num_steps=1, num_running=1)
    assert two_pairs.core.request("r1").attempt == 2
