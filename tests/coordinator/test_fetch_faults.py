"""Workers that are lost, or fall silent, in each state of a fetch: nothing of them is left over."""

from __future__ import annotations

import pytest

from baton.coordinator.routing.choices import PrefillChoice
from baton.coordinator.routing.prefix_fetches import PrefixFetches
from baton.coordinator.state import events as ev
from baton.runtime.prompts.block_hashes import block_hashes
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2

BLOCK, SIZE = 16, 800
LONG = list(range(900))
TIERS = (
    cluster_pb2.CACHE_TIER_UNSPECIFIED,
    cluster_pb2.CACHE_TIER_HOST,
    cluster_pb2.CACHE_TIER_DISK,
)
# A prompt token takes 1 ms to compute, and 0.01 ms to send at 10 GB/s.
MODEL = LatencyModel(0.02, 1e-3, 0.0, 0.030, 0.001, 1e-6)
HOLDER, READER, OTHER = "holder", "reader", "other"
NUM_BYTES = 2**20


@pytest.fixture
def world(new_world):
    """An elastic cell in which a busy worker holds the prompt in all tiers."""
    world = new_world(elastic=True, latency=MODEL)
    capacity = cluster_pb2.Capacity(
        kv_tokens=65536,
        host_kv_tokens=65536,
        disk_kv_tokens=65536,
        disk_bytes_per_s=10**9,
        block_size_tokens=BLOCK,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_send_bytes=2**20,
        max_receive_bytes=2**20,
        supports_forced_tokens=True,
        keeps_prefixes=True,
    )
    for name in (HOLDER, READER, OTHER):
        world.attach(name, common_pb2.ROLE_PREFILL, capacity=capacity)
    for tier in TIERS:
        keep(world, HOLDER, tier)
    busy = PrefillChoice((HOLDER, 1), 0.0, 9.0, 10)
    view_of(world).assign_prefill("busy", busy, [])
    return world


def view_of(world):
    return world.core.placers.of(world.core.fleets.stable).view


def keep(world, worker, tier):
    hashes = block_hashes(LONG[:SIZE], BLOCK)
    world.handle(ev.WorkerCache((worker, 1), cluster_pb2.CacheEvents(stored=hashes, tier=tier)))


def holders(world):
    """IDs of the workers that the coordinator would fetch the prompt from."""
    view = view_of(world)
    found = PrefixFetches(view).sources(view.match(block_hashes(LONG, BLOCK)))
    return {key[0] for key in found}


def reader_of(world):
    (request,) = world.core.running()
    return (request.prefill or request.decode)[0]


def handoffs_dropped(world, name):
    """Fetches that a worker was told to drop; a cancelled request of a client is none."""
    cancels = (one for one in world.commands[name] if isinstance(one, cluster_pb2.CancelCommand))
    return [one.handoff_id for one in cancels if one.request_id != "r1" or not one.attempt]


def report(world, worker, fetch, state):
    made = cluster_pb2.HandoffReport(
        handoff_id=fetch.handoff_id, state=state, num_bytes=NUM_BYTES, exposed_us=1000
    )
    world.handle(ev.WorkerHandoff((worker, 1), made))


def finish(world, out, to):
    """The worker that has the request answers it to its end."""
    (request,) = world.core.running()
    name, number = reader_of(world), request.attempt_number
    begin = len(request.token_ids)
    for offset in range(begin, 8):
        more = {} if offset < 7 else {"finish": common_pb2.FINISH_REASON_LENGTH}
        timings = {"timings": {"queue_us": 1}} if offset == begin else {}
        output = out("r1", [offset], offset=offset, attempt=number, **more, **timings)
        world.step(name, output)
    assert world.tokens(to) == list(range(8))


# State of the fetch, and how many tokens the client has then.
STATES = {"asked": 0, "sent": 0, "loaded": 1}


def reach(world, out, state):
    """Brings a request's fetch into a state; returns the request's stream, and its reader."""
    to = world.submit(num_prompt=900)
    name = reader_of(world)
    assert name != HOLDER
    fetch = world.commands[name][0].fetch
    assert fetch.num_tokens == SIZE
    if state != "asked":
        report(world, HOLDER, fetch, kv_transfer_pb2.HANDOFF_STATE_COMMITTED)
    if state == "loaded":
        world.step(name, out("r1", [0], timings={"num_fetched_tokens": SIZE}))
        keep(world, name, TIERS[0])
    return to, name


@pytest.mark.parametrize("how", ["lost", "silent"])
@pytest.mark.parametrize("victim", ["holder", "reader"])
@pytest.mark.parametrize("state", STATES)
def test_nothing_of_the_victim_is_left(world, out, state, victim, how):
    to, reader = reach(world, out, state)
    assert len(world.tokens(to)) == STATES[state]
    dead = HOLDER if victim == "holder" else reader
    if how == "lost":
        world.handle(ev.WorkerLost(dead, "was killed"))
    else:
        world.wait(5, silent=[dead])
    # Each tier of the dead worker has left the index, and no speed of it is known.
    assert dead not in holders(world)
    if how == "lost":
        speeds = world.core.placers.kv_speeds()
        assert dead not in {id_ for one in speeds for id_ in (one.worker, one.sender)}
        assert world.core.workers.get((dead, 1)) is None
    # Each worker that goes on is told not to wait for the other one, or not to send.
    told = {name: handoffs_dropped(world, name) for name in (HOLDER, reader)}
    assert bool(told[reader]) == (victim == "holder" and state == "asked")
    assert bool(told[HOLDER]) == (victim == "reader" and state == "asked")
    finish(world, out, to)
    view = view_of(world)
    for name in {HOLDER, READER, OTHER} - {dead}:
        load = view.loads.get((name, 1))
        assert (load.num_prefills, load.num_decodes) == (1 if name == HOLDER else 0, 0)
    view.check_integrity()
    assert not world.core.num_requests


def test_a_silent_holder_is_asked_again_when_it_is_back(world, out):
    to, _ = reach(world, out, "asked")
    world.wait(5, silent=[HOLDER])
    assert HOLDER not in holders(world)
    finish(world, out, to)
    world.handle(ev.WorkerHeard((HOLDER, 1)))
    assert HOLDER in holders(world)


def test_one_stopped_holder_does_not_make_the_network_slow(world, out):
    """A fetch whose time is over measures its own pair, if others have been measured."""
    view = view_of(world)
    pair, others = ((HOLDER, 1), (READER, 1)), ((OTHER, 1), (READER, 1))
    view.transfers.observe(others, 10**9, 0.1, near=True)
    view.transfers.observe_timeout(pair, 10**9, 5.0, near=True)
    assert view.transfers.seconds(pair, 10**9, near=True) == pytest.approx(10.0)
    unmeasured = ((OTHER, 1), (HOLDER, 1))
    assert view.transfers.seconds(unmeasured, 10**9, near=True) == pytest.approx(0.1)
