"""Recovery of requests from lost workers: no token is lost, repeated or sent by two attempts."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import RequestState
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from tests.coordinator.two_pairs import crash, decodes, hear_all_but, latest, prefills

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("stage", ["prefilling", "handing off", "decoding"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_lost_worker_is_replaced(two_pairs, out, stage, leg):
    to = two_pairs.submit()
    ((prefiller, prefill),) = prefills(two_pairs)
    known = []
    if stage != "prefilling":
        two_pairs.step(prefiller, out("r1", [7], text="a", finish=0))
        known = [7]
    decoder = "d" if prefill.handoff.target.startswith("d.") else "d2"
    if stage == "decoding":
        two_pairs.step(decoder, out("r1", [8], offset=1, text="b"))
        known = [7, 8]
    lost = prefiller if leg == "prefill" else decoder
    two_pairs.handle(ev.WorkerLost(lost, "was killed"))
    if stage == "decoding" and leg == "prefill":
        assert two_pairs.core.request("r1").attempt == 1
        two_pairs.step(decoder, out("r1", [9], offset=2, finish=STOP))
        assert two_pairs.tokens(to) == [7, 8, 9]
        return
    name, again = latest(prefills(two_pairs))
    assert again.spec.attempt == 2
    assert lost not in (name, again.handoff.target.split(".")[0])
    assert again.handoff.handoff_id != prefill.handoff.handoff_id
    # The other worker is told to cancel the older attempt before it gets the newer attempt.
    other = decoder if leg == "prefill" else prefiller
    cancel = next(c for c in two_pairs.commands[other] if isinstance(c, cluster_pb2.CancelCommand))
    assert (cancel.attempt, cancel.handoff_id) == (1, prefill.handoff.handoff_id)
    two_pairs.step(name, out("r1", [7], text="a", finish=0, attempt=2))
    name, decode = latest(decodes(two_pairs))
    assert list(decode.spec.known_token_ids) == (known or [7])
    assert decode.spec.known_text_chars == len(known or [7])
    offset = len(decode.spec.known_token_ids)
    two_pairs.step(name, out("r1", [9], offset=offset, text="c", finish=STOP, attempt=2))
    assert two_pairs.tokens(to) == [*(known or [7]), 9]
    finished = two_pairs.last(to)
    assert finished.reason == STOP
    stages = [one.stage for one in finished.budget.stages]
    assert sum(one.duration_us for one in finished.budget.stages) == finished.budget.total_us
    assert stages == sorted(set(stages), key=stages.index)


def test_a_request_that_waits_again_does_not_count_as_running(world):
    world.submit()
    world.handle(ev.WorkerLost("d", "was killed"))
    core, lane = world.core, common_pb2.LANE_INTERACTIVE
    assert core.request("r1").state is RequestState.RECOVERING
    assert (core.num_running(lane), core.num_queued(lane)) == (0, 1)
    world.attach("d2", DECODE)
    assert (core.num_running(lane), core.num_queued(lane)) == (1, 0)


def test_time_without_a_worker_counts_as_the_recovery_stage(world, out):
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


def test_attempts_without_progress_are_bounded(world, out):
    to = world.submit()
    world.step("p", out("r1", [7], finish=0))
    for attempt in range(1, 8):
        failed = out("r1", attempt=attempt)
        failed.failed.code, failed.failed.message = 13, "no kernel"
        world.step("p", out("r1", [7], finish=0, attempt=attempt))
        if attempt < 4:
            # Each of the first three attempts produces one new token.
            world.step("d", out("r1", [10 + attempt], offset=attempt, attempt=attempt))
        world.step("d", failed)
    assert world.tokens(to) == [7, 11, 12, 13]
    assert world.last(to).error.code == 13
    told = "4 attempts in a row were lost without a new token: no kernel"
    assert str(world.last(to).error) == told
    assert world.core.request("r1").attempt == 6


def test_workers_that_are_drained_one_after_the_other_lose_no_attempt(world, out):
    """An operator restarts each worker, and an output of minutes has to move each time."""
    to = world.submit()
    stopped = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_STOPPED)
    for attempt in range(1, 8):
        world.step("p", out("r1", [7], finish=0, attempt=attempt))
        world.handle(ev.DrainRequested("d", 0.0, "restart"))
        world.handle(ev.WorkerChanged(("d", attempt), stopped))
        assert world.core.request("r1").state is RequestState.RECOVERING
        world.after(0.1)
        world.attach("d", DECODE, incarnation=attempt + 1)
    world.step("p", out("r1", [7], finish=0, attempt=8))
    world.step("d", out("r1", [8], offset=1, finish=LENGTH, attempt=8), incarnation=8)
    assert world.tokens(to) == [7, 8]
    stats, budget = world.core.stats, world.last(to).budget
    assert (stats.num_moved, stats.num_recoveries, stats.num_workers_lost) == (7, 0, 0)
    assert common_pb2.STAGE_PARKED in {one.stage for one in budget.stages}
    assert common_pb2.STAGE_RECOVERY not in {one.stage for one in budget.stages}


def test_an_invalid_request_is_not_retried(world, out):
    to = world.submit()
    failed = out("r1")
    failed.failed.code, failed.failed.message = 3, "no such grammar"
    world.step("p", failed)
    assert world.last(to).error.code == 3
    assert len(prefills(world)) == 1


def test_a_retry_avoids_the_worker_that_failed_the_attempt(two_pairs, out):
    two_pairs.submit()
    ((first, _),) = prefills(two_pairs)
    failed = out("r1")
    failed.failed.code, failed.failed.message = 14, "no staging"
    two_pairs.step(first, failed)
    assert latest(prefills(two_pairs))[0] != first


def test_asking_for_other_workers_changes_no_order_among_equal_ones(two_pairs):
    """Each worker that the request avoids takes no part in one question, and then returns."""
    two_pairs.submit()
    request = two_pairs.core.request("r1")
    placer = two_pairs.core.placers.of(request.fleet)
    two_pairs.handle(ev.RequestCancelled("r1"))
    loads = placer.view.loads
    first = loads.by_queue.least(), loads.by_itl.least(), loads.by_room.least()
    for worker in dict.fromkeys(first):
        request.avoid = {worker: None}
        placer.place(request)
    assert (loads.by_queue.least(), loads.by_itl.least(), loads.by_room.least()) == first
    assert loads.fastest_on(loads.entries[first[1]].traits.host_id) == first[1]
    placer.check_integrity()


def test_a_committed_handoff_survives_the_loss_of_its_sender(two_pairs, out):
    to = two_pairs.submit()
    ((prefiller, prefill),) = prefills(two_pairs)
    two_pairs.step(prefiller, out("r1", [7], finish=0))
    report = cluster_pb2.HandoffReport(
        request_id="r1",
        attempt=1,
        handoff_id=prefill.handoff.handoff_id,
        state=kv_transfer_pb2.HANDOFF_STATE_COMMITTED,
    )
    two_pairs.handle(ev.WorkerHandoff((prefiller, 1), report))
    two_pairs.handle(ev.WorkerLost(prefiller, "was killed"))
    assert two_pairs.core.request("r1").attempt == 1
    assert two_pairs.kinds(to) == ["Accepted", "Delta"]


def test_a_request_without_a_replacement_worker_fails_after_max_recovery_s(world, out):
    to = world.submit()
    world.step("p", out("r1", [7], finish=0))
    world.handle(ev.WorkerLost("d", "was killed by SIGKILL"))
    for _ in range(70):
        world.after(0.5)
        hear_all_but(world)
    assert str(world.last(to).error) == (
        "no decode worker is attached: waited 30 s after worker d was killed by SIGKILL"
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_stream_is_complete_after_random_worker_failures(new_world, out, data):
    """Workers answer, crash, fall silent, wake up and restart in any order.

    Token i of every output has the ID i, so that a lost, repeated or foreign token is noticed.
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
    # Commands that each worker process has received and not yet carried out or cancelled.
    held: dict[tuple[str, int], list] = {}
    progress: dict[tuple, int] = {}

    def receive_commands():
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
        receive_commands()
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
                hear_all_but(world, *(set(incarnation) - running))
    for name in incarnation:
        if world.core.workers.by_id(name) is None:
            replace(name)
    for _ in range(100):
        hear_all_but(world)
        receive_commands()
        for name in incarnation:
            work(name, at_random=False)
        world.after(0.1)
    for to in streams:
        assert world.tokens(to) == list(range(6))
        assert world.kinds(to).count("Finished") == 1
    assert world.core.num_requests == 0
    for worker in world.core.workers:
        assert not list(worker.ledger)
        assert not worker.ledger.handoffs


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
def test_known_tokens_are_computed_and_handed_over_with_the_prompt(
    two_pairs, out, sampling, joined
):
    """The prefill worker computes known output tokens together with the prompt, with exceptions.

    A sampler with state (a seed, penalties) must see each known token on its own, and prompt log
    probabilities must not include output tokens.
    """
    two_pairs.submit(sampling=sampling)
    ((prefiller, prefill),) = prefills(two_pairs)
    assert (len(prefill.spec.prompt_token_ids), prefill.handoff.num_tokens) == (20, 20)
    two_pairs.step(prefiller, out("r1", [7], finish=0))
    ((decoder, _),) = decodes(two_pairs)
    two_pairs.step(decoder, out("r1", [8, 9], offset=1))
    two_pairs.handle(ev.WorkerLost(decoder, "was killed"))
    name, again = latest(prefills(two_pairs))
    assert list(again.spec.prompt_token_ids) == [*range(20), *joined]
    two_pairs.step(name, out("r1", [1], finish=0, attempt=2))
    _, decode = latest(decodes(two_pairs))
    assert list(decode.spec.prompt_token_ids) == list(range(20))
    assert list(decode.spec.known_token_ids) == [7, 8, 9]
    assert decode.handoff == again.handoff
    assert decode.handoff.num_tokens == 20 + len(joined)
