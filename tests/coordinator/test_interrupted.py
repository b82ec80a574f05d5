"""Streams that lost their worker or their connection continue before new requests begin."""

from __future__ import annotations

import pytest

from baton.coordinator.state import events as ev
from baton.coordinator.state.requests import RequestState
from baton.runtime.config import InteractiveLaneConfig, LanesConfig, TenantConfig
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.two_pairs import pairs

INTERACTIVE, BATCH = common_pb2.LANE_INTERACTIVE, common_pb2.LANE_BATCH
STOP = common_pb2.FINISH_REASON_STOP
LONG = {"max_tokens": 500}


@pytest.fixture
def make(new_world, out):
    """Factory of a world whose two decode workers take one request each."""

    def make(hello=None, **changes):
        silent = dict.fromkeys(("worker_timeout_s", "worker_silent_s", "worker_stuck_s"), 1e6)
        world = pairs(new_world(**{"max_decode_requests": 1, **silent, **changes}), **(hello or {}))
        # Requests of an earlier coordinator are no longer expected.
        world.after(10.0)

        def request(to):
            return next(one for one in world.core.running() if one.submission.to == to)

        def begin(num_tokens=2, **fields):
            """Submits a request and lets it decode; returns it."""
            return decode(world.submit(**{"sampling": LONG, **fields}), num_tokens)

        def decode(to, num_tokens=2):
            one = request(to)
            first = out(one.key, [7], finish=0, attempt=one.attempt_number)
            world.step(one.prefill[0], first)
            for _ in range(num_tokens - 1):
                token(to)
            return one

        def token(to, **fields):
            one = request(to)
            offset = len(one.token_ids)
            output = out(one.key, [7], offset, attempt=one.attempt_number, **fields)
            world.step(one.decode[0], output)

        world.begin, world.decode, world.token = begin, decode, token
        return world

    return make


def die(world, stream):
    world.handle(ev.WorkerLost(stream.decode[0], "died"))


def leave(world, stream):
    """The worker stops when its time to drain is over."""
    worker = stream.decode
    world.handle(ev.DrainRequested(worker[0], 5.0, "restart"))
    stopped = cluster_pb2.WorkerStateChanged(state=cluster_pb2.WORKER_STATE_STOPPED)
    world.handle(ev.WorkerChanged(worker, stopped))


def reconnect(world, stream):
    """The client loses its connection, and resumes its stream over another one."""
    world.handle(ev.SessionLost(stream.submission.to.session))
    resume(world, stream)


def resume(world, stream, **changes):
    before = stream.submission
    fields = {
        "request_id": before.request_id,
        "tenant": before.tenant,
        "lane": before.lane,
        "prompt_token_ids": before.prompt_token_ids,
        "sampling": LONG,
        "known_token_ids": list(stream.token_ids),
        **changes,
    }
    world.submit(before.to.session + 1, **fields)


@pytest.mark.parametrize("num_prompt", [20, 100])
@pytest.mark.parametrize("interrupt", [die, leave, reconnect])
def test_a_stream_continues_before_new_requests_of_other_tenants(make, interrupt, num_prompt):
    """Its tenant has been served most. New prompts of 100 tokens wait with the batch prompts."""
    world = make(lanes=LanesConfig(long_prompt_tokens=50))
    stream = world.begin(100, session=1, num_prompt=num_prompt, tenant="a")
    other = world.begin(session=9, tenant="b")
    for tenant in ("b", "c", "d"):
        world.submit(9, tenant=tenant)
    interrupt(world, stream)
    world.token(other.submission.to, finish=STOP)
    assert world.core.request(stream.id).state is RequestState.PREFILLING


ONE_RUNS = LanesConfig(interactive=InteractiveLaneConfig(max_running=1))


@pytest.mark.parametrize(
    ("interrupt", "other", "changes"),
    [
        (die, "b", {"lanes": ONE_RUNS}),
        (leave, "b", {"lanes": ONE_RUNS}),
        (reconnect, "b", {"lanes": ONE_RUNS}),
        (reconnect, "a", {"tenant_defaults": TenantConfig(max_concurrent=1)}),
    ],
)
def test_a_stream_does_not_wait_for_a_limit_of_requests(make, interrupt, other, changes):
    """A new request may have taken its place meanwhile."""
    world = make(**changes)
    stream = world.begin(session=1, tenant="a")
    world.submit(9, tenant=other)
    interrupt(world, stream)
    assert world.core.request(stream.id).state is RequestState.PREFILLING


def test_a_client_that_resumes_again_and_again_gets_twice_its_limit_at_most(make):
    world = make(max_decode_requests=8, tenant_defaults=TenantConfig(max_concurrent=1))
    streams = [world.begin(session=10)]
    later = [world.submit(session, sampling=LONG) for session in (20, 30)]
    for _ in later:
        for stream in streams:
            world.handle(ev.SessionLost(stream.submission.to.session))
        started = next(one for one in world.core.running() if not one.waits)
        for stream in streams:
            resume(world, stream)
        streams = [world.core.request(one.id) for one in streams]
        streams.append(world.decode(started.submission.to))
    assert [one.waits for one in streams] == [False, True, False]
    world.handle(ev.StreamCancelled(streams[0].submission.to))
    assert not streams[1].waits


def test_a_claim_to_continue_an_output_does_not_get_around_limits(make):
    """The coordinator knows no such output, or began it in the batch lane."""
    world = make(lanes=ONE_RUNS)
    running, job = world.begin(session=1), world.begin(session=2, lane=BATCH)
    resume(world, job, lane=INTERACTIVE)
    resume(world, running, request_id="other")
    assert world.core.request(job.id).state is RequestState.QUEUED
    assert world.core.request("other").state is RequestState.QUEUED


@pytest.mark.parametrize("long_prompt_tokens", [0, 600])
def test_a_stream_that_fits_nowhere_holds_up_no_others(make, long_prompt_tokens):
    """Neither interrupted streams after it nor new requests."""
    capacity = cluster_pb2.Capacity(
        kv_tokens=1024,
        block_size_tokens=16,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_send_bytes=2**30,
        max_receive_bytes=2**30,
        supports_forced_tokens=True,
        keeps_prefixes=True,
    )
    lanes = LanesConfig(long_prompt_tokens=long_prompt_tokens)
    world = make(
        {"capacity": capacity},
        lanes=lanes,
        max_decode_requests=64,
        max_prefill_requests=16,
    )
    brief = {"max_tokens": 20}
    large = world.begin(session=1, num_prompt=700, tenant="a", sampling=brief)
    world.begin(session=2, num_prompt=500, tenant="b", sampling=brief)
    small = [
        world.begin(session=session, num_prompt=20, tenant=f"c{session}", sampling=brief)
        for session in range(3, 9)
    ]
    with_large = [one for one in small if one.decode == large.decode]
    assert with_large
    die(world, large)
    new = world.submit(9, num_prompt=20, tenant="d")
    started = next(one for one in world.core.running() if one.submission.to == new)
    assert large.waits
    assert not any(one.waits for one in [*with_large, started])
