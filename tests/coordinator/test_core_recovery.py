"""A stream survives its workers: nothing is repeated, lost or fed by two."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.coordinator.core import events as ev
from baton.coordinator.core.request import RequestState
from baton.runtime import errors
from baton.runtime.config import BatchLaneConfig, InteractiveLaneConfig, LanesConfig
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


@pytest.fixture
def two(new_world):
    """Two workers in each pool."""
    return pairs(new_world())


def pairs(world):
    for name in ("p", "p2"):
        world.attach(name, PREFILL)
    for name in ("d", "d2"):
        world.attach(name, DECODE)
    return world


def commands(world, kind):
    """Of all workers: (worker, command), in no order between workers."""
    return [
        (name, command)
        for name, sent in world.commands.items()
        for command in sent
        if isinstance(command, kind)
    ]


def prefills(world):
    return commands(world, cluster_pb2.PrefillCommand)


def decodes(world):
    return commands(world, cluster_pb2.DecodeCommand)


def latest(found):
    """The one of the highest attempt."""
    return max(found, key=lambda one: one[1].spec.attempt)


def silent_but(world, *names):
    """Everyone else is heard: a moment passes."""
    for worker in world.core.workers:
        if worker.id not in names:
            world.handle(ev.WorkerHeard(worker.key))


@pytest.mark.parametrize("stage", ["prefilling", "handing off", "decoding"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_lost_worker_is_replaced(two, out, stage, leg):
    to = two.submit()
    ((prefiller, prefill),) = prefills(two)
    known = []
    if stage != "prefilling":
        two.step(prefiller, out("r1", [7], text="a", finish=0))
        known = [7]
    decoder = "d" if prefill.handoff.target.startswith("d.") else "d2"
    if stage == "decoding":
        two.step(decoder, out("r1", [8], offset=1, text="b"))
        known = [7, 8]
    lost = prefiller if leg == "prefill" else decoder
    two.handle(ev.WorkerLost(lost, "was killed"))
    if stage == "decoding" and leg == "prefill":
        assert two.core.request("r1").attempt == 1
        two.step(decoder, out("r1", [9], offset=2, finish=STOP))
        assert two.tokens(to) == [7, 8, 9]
        return
    name, again = latest(prefills(two))
    assert again.spec.attempt == 2
    assert lost not in (name, again.handoff.target.split(".")[0])
    assert again.handoff.handoff_id != prefill.handoff.handoff_id
    # The twin, if it lives, forgets the older attempt before it hears of the newer one.
    twin = decoder if leg == "prefill" else prefiller
    cancel = next(c for c in two.commands[twin] if isinstance(c, cluster_pb2.CancelCommand))
    assert (cancel.attempt, cancel.handoff_id) == (1, prefill.handoff.handoff_id)
    two.step(name, out("r1", [7], text="a", finish=0, attempt=2))
    name, decode = latest(decodes(two))
    assert list(decode.spec.known_token_ids) == (known or [7])
    assert decode.spec.known_text_chars == len(known or [7])
    offset = len(decode.spec.known_token_ids)
    two.step(name, out("r1", [9], offset=offset, text="c", finish=STOP, attempt=2))
    assert two.tokens(to) == [*(known or [7]), 9]
    finished = two.last(to)
    assert finished.reason == STOP
    stages = [one.stage for one in finished.budget.stages]
    assert sum(one.duration_us for one in finished.budget.stages) == finished.budget.total_us
    assert stages == sorted(set(stages), key=stages.index)


def test_time_without_a_worker_is_recovery(world, out):
    to = world.submit()
    world.after(1.0)
    world.step("p", out("r1", [7], finish=0))
    world.after(0.5)
    world.step("d", out("r1", [8], offset=1))
    world.after(0.25)
    world.handle(ev.WorkerLost("d", "was killed"))
    world.after(1.0)
    world.attach("d", DECODE, incarnation=2)
    world.after(0.5)
    world.step("p", out("r1", [7], finish=0, attempt=2))
    world.step("d", out("r1", [9], offset=2, attempt=2), incarnation=2)
    world.after(0.125)
    world.step("d", out("r1", [10], offset=3, finish=LENGTH, attempt=2), incarnation=2)
    budget = world.last(to).budget
    (recovery,) = [one for one in budget.stages if one.stage == common_pb2.STAGE_RECOVERY]
    assert (recovery.start_us, recovery.duration_us) == (1_750_000, 1_500_000)
    assert sum(one.duration_us for one in budget.stages) == budget.total_us == 3_375_000
    assert world.core.stats.num_recoveries == 1


def test_a_silent_workers_requests_move_and_it_comes_back(two, out):
    to = two.submit()
    ((prefiller, _),) = prefills(two)
    two.step(prefiller, out("r1", [7], finish=0))
    ((decoder, _),) = decodes(two)
    two.step(decoder, out("r1", [8], offset=1))
    other = "d2" if decoder == "d" else "d"
    for _ in range(5):
        two.after(0.5)
        silent_but(two, decoder)
    assert two.core.workers.by_id(decoder).unresponsive.startswith("was silent for 2")
    name, again = latest(prefills(two))
    assert again.handoff.target == f"{other}.test:1"
    two.step(name, out("r1", [7], finish=0, attempt=2))
    # It wakes up, and goes on with what it had: nobody hears that.
    two.step(decoder, out("r1", [9], offset=2))
    two.step(decoder, out("r1", [10], offset=3, finish=STOP))
    assert two.tokens(to) == [7, 8]
    two.step(other, out("r1", [9], offset=2, finish=LENGTH, attempt=2))
    assert two.tokens(to) == [7, 8, 9]
    assert two.last(to).reason == LENGTH
    assert two.core.workers.by_id(decoder).serving
    assert two.core.workers.by_id(decoder).assigned == {}


@pytest.mark.parametrize(("silences_s", "noticed_s"), [([], 1.33), ([0.9], 1.8), ([0.9, 1.4], 2.0)])
def test_what_silence_is_unusual_is_learned_worker_by_worker(two, out, silences_s, noticed_s):
    """2 s are configured, and two thirds of that are the least.

    A worker that was late lately gets twice its longest silence.
    """
    for beat in range(60):
        two.after(0.5)
        report = cluster_pb2.LoadReport(num_steps=beat)
        for worker in two.core.workers:
            two.handle(ev.WorkerLoad(worker.key, report))
    to = two.submit()
    ((prefiller, prefill),) = prefills(two)
    two.step(prefiller, out("r1", [7], finish=0))
    decoder = "d" if prefill.handoff.target.startswith("d.") else "d2"
    for silence_s in silences_s:
        two.after(silence_s)
        silent_but(two)
    two.step(decoder, out("r1", [8], offset=1))
    begun_at = two.now
    while not any(one.spec.attempt == 2 for _, one in prefills(two)):
        two.after(0.05)
        silent_but(two, decoder)
        assert two.now < begun_at + 3
    assert two.now - begun_at == pytest.approx(noticed_s, abs=0.06)
    assert two.tokens(to) == [7, 8]


def test_a_broken_connection_is_waited_for_less_than_silence(two, out):
    two.submit()
    ((prefiller, _),) = prefills(two)
    two.handle(ev.WorkerDetached((prefiller, 1)))
    two.after(0.4)
    # Back in time: nothing moves.
    two.attach(prefiller, PREFILL)
    two.after(0.4)
    assert two.core.request("r1").attempt == 1
    two.handle(ev.WorkerDetached((prefiller, 1)))
    two.after(0.6)
    assert two.core.request("r1").attempt == 2
    assert two.core.workers.by_id(prefiller) is not None


def test_the_end_of_a_silent_workers_stream_is_no_sign_of_life(two):
    for _ in range(6):
        two.after(0.5)
        silent_but(two, "d")
    assert two.core.workers.by_id("d").unresponsive
    two.handle(ev.WorkerDetached(("d", 1)))
    assert two.core.workers.by_id("d").unresponsive
    # Lost when it has been silent for long enough, not when it has been gone for so long.
    for _ in range(15):
        two.after(0.5)
        silent_but(two, "d")
    assert two.core.workers.by_id("d") is None
    assert two.core.stats.num_workers_unresponsive == 1


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
def test_a_coordinator_that_stood_still_blames_no_worker(two, stood_still_s, out):
    to = two.submit()
    ((prefiller, _),) = prefills(two)
    load = cluster_pb2.LoadReport(num_steps=1, num_running=1)
    two.handle(ev.WorkerLoad((prefiller, 1), load))
    two.now += stood_still_s
    # Timers come first; what the workers said meanwhile is read after them.
    two.handle(ev.Tick())
    two.handle(ev.WorkerLoad((prefiller, 1), load))
    silent_but(two)
    assert two.core.request("r1").attempt == 1
    assert len(list(two.core.workers)) == 4
    assert all(worker.serving for worker in two.core.workers)
    two.step(prefiller, out("r1", [7], finish=0))
    assert two.tokens(to) == [7]
    # Whoever is silent from then on is noticed as ever.
    for _ in range(6):
        two.after(0.4)
        silent_but(two, "d", "d2")
    assert two.core.request("r1").attempt == 2


@pytest.mark.parametrize("stood_still_s", [0.7, 1.0, 1.1, 1.3, 1.4])
@pytest.mark.parametrize("reads_one_first", [False, True])
def test_a_moment_of_its_own_is_no_silence_of_punctual_workers(
    new_world, out, stood_still_s, reads_one_first
):
    """Shorter than what tells by overdue timers that the coordinator itself stood still."""
    # Of the punctual it is 1 s, as with the configuration's defaults.
    two = pairs(new_world(worker_silent_s=1.5))
    two.submit()
    ((prefiller, _),) = prefills(two)
    two.step(prefiller, out("r1", [7], finish=0))
    ((decoder, _),) = decodes(two)
    other = "d2" if decoder == "d" else "d"
    for beat in range(60):
        report = cluster_pb2.LoadReport(num_steps=beat)
        for worker in two.core.workers:
            two.after(0.12)
            two.handle(ev.WorkerLoad(worker.key, report))
    # Whatever the timers are set to.
    for beats in range(8):
        for _ in range(beats):
            two.after(0.12)
            silent_but(two)
        two.now += stood_still_s
        if reads_one_first:
            two.handle(ev.WorkerHeard((other, 1)))
        two.handle(ev.Tick())
        two.after(0.01)
        silent_but(two)
        assert two.core.request("r1").attempt == 1
        for _ in range(60):
            two.after(0.4)
            for worker in two.core.workers:
                two.handle(ev.WorkerLoad(worker.key, report))
    # Whoever is silent from then on is noticed as ever.
    begun_at = two.now
    while not two.core.workers.by_id(decoder).unresponsive:
        two.after(0.1)
        silent_but(two, decoder)
    assert two.now - begun_at == pytest.approx(1.0, abs=0.11)


@pytest.mark.parametrize("beat_s", [0.1, 0.11, 0.15])
def test_heartbeats_that_are_late_hide_no_silence(new_world, beat_s):
    """Of a few workers there may be a heartbeat's time, and more, in which nobody is heard."""
    two = pairs(new_world(heartbeat_s=0.1, worker_silent_s=0.3))
    for _ in range(40):
        two.after(beat_s)
        silent_but(two)
    begun_at = two.now
    while not two.core.workers.by_id("d").unresponsive:
        two.after(beat_s)
        silent_but(two, "d")
        assert two.now < begun_at + 1
    assert two.now - begun_at < 0.3 + 2 * beat_s


def test_a_stuck_engine_is_told_by_its_steps(two):
    two.submit()
    ((prefiller, _),) = prefills(two)

    def report(num_steps, num_running=1):
        load = cluster_pb2.LoadReport(num_steps=num_steps, num_running=num_running)
        two.handle(ev.WorkerLoad((prefiller, 1), load))

    def beats(count, num_steps):
        for _ in range(count):
            two.after(0.5)
            silent_but(two, prefiller)
            report(num_steps)

    report(1)
    beats(38, num_steps=1)
    assert two.core.request("r1").attempt == 1
    beats(3, num_steps=1)
    assert two.core.request("r1").attempt == 2
    assert not two.core.workers.by_id(prefiller).serving
    beats(1, num_steps=2)
    assert two.core.workers.by_id(prefiller).serving
    beats(130, num_steps=2)
    assert two.core.workers.by_id(prefiller) is None
    assert "has made no step for 60" in str(two.membership[-1].error)


def test_attempts_without_progress_are_bounded(world, out):
    to = world.submit()
    world.step("p", out("r1", [7], finish=0))
    for attempt in range(1, 8):
        failed = out("r1", attempt=attempt)
        failed.failed.code, failed.failed.message = 13, "no kernel"
        world.step("p", out("r1", [7], finish=0, attempt=attempt))
        if attempt < 4:
            # Every attempt gets one token further.
            world.step("d", out("r1", [10 + attempt], offset=attempt, attempt=attempt))
        world.step("d", failed)
    assert world.tokens(to) == [7, 11, 12, 13]
    assert world.last(to).error.code == 13
    told = "4 attempts in a row were lost without a new token: no kernel"
    assert str(world.last(to).error) == told
    assert world.core.request("r1").attempt == 6


def test_what_is_wrong_with_the_request_is_not_tried_again(world, out):
    to = world.submit()
    failed = out("r1")
    failed.failed.code, failed.failed.message = 3, "no such grammar"
    world.step("p", failed)
    assert world.last(to).error.code == 3
    assert len(prefills(world)) == 1


def test_the_worker_that_gave_up_is_avoided(two, out):
    two.submit()
    ((first, _),) = prefills(two)
    failed = out("r1")
    failed.failed.code, failed.failed.message = 14, "no staging"
    two.step(first, failed)
    assert latest(prefills(two))[0] != first


def crash(world, name, incarnation, *, failed=True):
    change = cluster_pb2.WorkerStateChanged(
        state=cluster_pb2.WORKER_STATE_STOPPED, reason="engine: died", failed=failed
    )
    world.handle(ev.WorkerChanged((name, incarnation), change))


def test_a_request_that_kills_workers_is_failed_after_two(two, out):
    innocent = two.submit(num_prompt=20)
    poison = two.submit(num_prompt=30)
    (first,) = {name for name, one in prefills(two) if one.spec.request_id == "r2"}
    crash(two, first, 1)
    two.attach(first, PREFILL, incarnation=2)
    name, again = latest([one for one in prefills(two) if one[1].spec.request_id == "r2"])
    assert again.spec.attempt == 2
    # Nothing else is sent to where it runs until it has answered.
    for _ in range(2):
        two.submit()
    assert {n for n, one in prefills(two) if one.spec.request_id in ("r3", "r4")} == {
        "p" if name == "p2" else "p2"
    }
    crash(two, name, two.core.workers.by_id(name).hello.incarnation)
    assert isinstance(two.last(poison).error, errors.Internal)
    assert "two workers" in str(two.last(poison).error)
    assert two.kinds(innocent) == ["Accepted"]


def test_a_worker_that_was_to_leave_is_no_death_of_its_requests_doing(two):
    """Another came under its id before anybody had heard of its end."""
    to = two.submit()
    ((first, _),) = prefills(two)
    crash(two, first, 1)
    ((name, _),) = [one for one in prefills(two) if one[1].spec.attempt == 2]
    two.handle(ev.DrainAsked(name, 30.0, "test"))
    two.attach(name, PREFILL, incarnation=9)
    assert two.kinds(to) == ["Accepted"]
    assert max(one.spec.attempt for _, one in prefills(two)) == 3


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_worker_that_had_a_suspect_by_itself_is_given_others_when_that_is_gone(two, how):
    poison = two.submit(timeout_s=5.0)
    ((first, _),) = prefills(two)
    crash(two, first, 1)
    ((alone, _),) = [one for one in prefills(two) if one[1].spec.attempt == 2]
    to = two.submit()
    assert two.core.request("r2").state is RequestState.QUEUED
    if how == "cancelled":
        two.handle(ev.StreamCancelled(poison))
    else:
        for _ in range(10):
            two.after(0.5)
            silent_but(two)
    silent_but(two)
    assert two.core.request("r2").prefill[0] == alone
    assert two.kinds(to) == ["Accepted"]


@pytest.mark.parametrize("lane", [common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH])
def test_a_suspect_gets_its_turn_however_many_wait_in_the_other_lane(new_world, out, lane):
    """A worker that is always given more has never answered everything."""
    lanes = LanesConfig(
        interactive=InteractiveLaneConfig(max_queued=99),
        batch=BatchLaneConfig(max_queued=99, share=0.5),
    )
    world = pairs(new_world(lanes=lanes, max_running_requests=99))
    other = common_pb2.LANE_INTERACTIVE
    if lane == other:
        other = common_pb2.LANE_BATCH

    def submit():
        world.submit(lane=other, sampling={"max_tokens": 1})

    def answer(worker, key):
        request = world.core.request(key)
        ended = out(key, [7], finish=LENGTH, attempt=request.attempt_number)
        world.step(worker.id, ended, incarnation=worker.hello.incarnation)

    world.submit(lane=lane)
    suspect = world.core.request("r1")
    first = world.core.workers.get(suspect.prefill)
    for _ in range(4):
        submit()
    for key in [one for one in first.unanswered if one != "r1"]:
        answer(first, key)
    crash(world, first.id, 1)
    assert suspect.suspect
    assert suspect.state is RequestState.RECOVERING
    for _ in range(30):
        submit()
    for _ in range(15):
        if suspect.state is RequestState.PREFILLING:
            break
        worker = next(one for one in world.core.workers if one.unanswered)
        answer(worker, next(iter(worker.unanswered)))
    assert suspect.state is RequestState.PREFILLING
    assert world.core.num_queued(other) > 0


def test_a_stream_that_was_answered_is_no_suspect(two, out):
    to = two.submit()
    for attempt in range(1, 4):
        name, prefill = latest(prefills(two))
        two.step(name, out("r1", [7], finish=0, attempt=attempt))
        decoder = prefill.handoff.target.split(".")[0]
        incarnation = two.core.workers.by_id(decoder).hello.incarnation
        token = out("r1", [10 + attempt], offset=attempt, attempt=attempt)
        two.step(decoder, token, incarnation=incarnation)
        crash(two, decoder, incarnation)
        two.attach(decoder, DECODE, incarnation=incarnation + 1)
    assert two.tokens(to) == [7, 11, 12, 13]
    assert two.core.request("r1").state is RequestState.PREFILLING


def test_a_committed_handoff_outlives_its_sender(two, out):
    to = two.submit()
    ((prefiller, prefill),) = prefills(two)
    two.step(prefiller, out("r1", [7], finish=0))
    report = cluster_pb2.HandoffReport(
        request_id="r1",
        attempt=1,
        handoff_id=prefill.handoff.handoff_id,
        state=kv_transfer_pb2.HANDOFF_STATE_COMMITTED,
    )
    two.handle(ev.WorkerHandoff((prefiller, 1), report))
    two.handle(ev.WorkerLost(prefiller, "was killed"))
    assert two.core.request("r1").attempt == 1
    assert two.kinds(to) == ["Accepted", "Delta"]


def test_without_a_worker_it_fails_in_time_and_says_why(world, out):
    to = world.submit()
    world.step("p", out("r1", [7], finish=0))
    world.handle(ev.WorkerLost("d", "was killed by SIGKILL"))
    for _ in range(70):
        world.after(0.5)
        silent_but(world)
    assert str(world.last(to).error) == (
        "no decode worker is attached: waited 30 s after worker d was killed by SIGKILL"
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_dies_every_stream_is_whole(new_world, out, data):
    """Workers answer, die, fall silent, wake and come back in any order.

    Token i of every output is i: a lost, repeated or foreign one shows.
    """
    world = new_world(max_lost_attempts=10_000, max_prefill_requests=8, max_decode_requests=8)
    incarnation = dict.fromkeys(("p", "p2", "d", "d2"), 0)

    def attach(name):
        incarnation[name] += 1
        world.attach(name, PREFILL if name[0] == "p" else DECODE, incarnation[name])

    def replace(name):
        seen[name] = len(world.commands[name])
        running.add(name)
        attach(name)

    seen = dict.fromkeys(incarnation, 0)
    running = set(incarnation)
    for name in incarnation:
        attach(name)
    streams = [world.submit(sampling={"max_tokens": 6}) for _ in range(4)]
    # What each worker process has been told and not done, whether or not it is still wanted.
    held: dict[tuple[str, int], list] = {}
    progress: dict[tuple, int] = {}

    def hear():
        for name, sent in world.commands.items():
            for command in sent[seen[name] :]:
                mine = held.setdefault((name, incarnation[name]), [])
                if isinstance(command, cluster_pb2.CancelCommand):
                    mine[:] = [
                        one
                        for one in mine
                        if (one.spec.request_id, one.spec.attempt)
                        != (command.request_id, command.attempt)
                    ]
                elif isinstance(command, cluster_pb2.PrefillCommand | cluster_pb2.DecodeCommand):
                    mine.append(command)
            seen[name] = len(sent)

    def work(name, at_random=True):
        mine = held.get((name, incarnation[name]), [])
        if not mine:
            return
        command = data.draw(st.sampled_from(mine)) if at_random and len(mine) > 1 else mine[0]
        spec = command.spec
        if isinstance(command, cluster_pb2.PrefillCommand):
            mine.remove(command)
            tokens = [0] if not spec.sampling.ignore_eos else [99]
            world.step(
                name,
                out(spec.request_id, tokens, finish=0, attempt=spec.attempt),
                incarnation=incarnation[name],
            )
            return
        at = progress.setdefault(
            (name, incarnation[name], spec.request_id, spec.attempt), len(spec.known_token_ids)
        )
        progress[name, incarnation[name], spec.request_id, spec.attempt] = at + 1
        finish = LENGTH if at == 5 else None
        if finish is not None:
            mine.remove(command)
        world.step(
            name,
            out(spec.request_id, [at], offset=at, attempt=spec.attempt, finish=finish),
            incarnation=incarnation[name],
        )

    for _ in range(data.draw(st.integers(10, 60))):
        hear()
        name = data.draw(st.sampled_from(sorted(incarnation)))
        match data.draw(st.sampled_from(["work"] * 6 + ["kill", "stop", "wake", "time"])):
            case "work" if name in running:
                work(name)
            case "kill":
                crash(world, name, incarnation[name], failed=False)
                replace(name)
            case "stop":
                running.discard(name)
            case "wake":
                running.add(name)
            case "time":
                world.after(1.1)
                silent_but(world, *(set(incarnation) - running))
    for name in incarnation:
        if world.core.workers.by_id(name) is None:
            replace(name)
    for _ in range(100):
        silent_but(world)
        hear()
        for name in incarnation:
            work(name, at_random=False)
        world.after(0.1)
    for to in streams:
        assert world.tokens(to) == list(range(6))
        assert world.kinds(to).count("Finished") == 1
    assert world.core.num_requests == 0
    assert not any(worker.assigned or worker.sending for worker in world.core.workers)


@pytest.mark.parametrize(
    ("sampling", "joined"),
    [
        ({}, [7, 8]),
        ({"seed": 3, "temperature": 0.0}, [7, 8]),
        ({"seed": 3}, []),
        ({"presence_penalty": 0.5}, []),
        ({"prompt_logprobs": 1}, []),
    ],
)
def test_known_tokens_are_computed_and_handed_over_with_the_prompt(two, out, sampling, joined):
    """Unless they are to go through the sampler one by one, or would be taken for the prompt's."""
    two.submit(sampling=sampling)
    ((prefiller, prefill),) = prefills(two)
    assert (len(prefill.spec.prompt_token_ids), prefill.handoff.num_tokens) == (20, 20)
    two.step(prefiller, out("r1", [7], finish=0))
    ((decoder, _),) = decodes(two)
    two.step(decoder, out("r1", [8, 9], offset=1))
    two.handle(ev.WorkerLost(decoder, "was killed"))
    name, again = latest(prefills(two))
    assert list(again.spec.prompt_token_ids) == [*range(20), *joined]
    two.step(name, out("r1", [1], finish=0, attempt=2))
    _, decode = latest(decodes(two))
    assert list(decode.spec.prompt_token_ids) == list(range(20))
    assert list(decode.spec.known_token_ids) == [7, 8, 9]
    assert decode.handoff == again.handoff
    assert decode.handoff.num_tokens == 20 + len(joined)
