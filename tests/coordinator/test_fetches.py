"""Placement fetches the beginning of a prompt from the worker that holds it, where that pays."""

from __future__ import annotations

import gc
import math
import random

import pytest

from baton.coordinator.routing.choices import NoPlacement, PrefillChoice
from baton.coordinator.routing.elastic.candidates import Demand
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_traits import WorkerTraits
from baton.coordinator.routing.speeds.transfers import Transfers
from baton.coordinator.state import events as ev
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import Request
from baton.runtime.durations import to_seconds
from baton.runtime.prompts.block_hashes import block_hashes
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from tests.coordinator.fixed_latency import FixedLatency
from tests.coordinator.worker_choices import elastic_choices, pool_choices

BLOCK = 16
DEVICE, HOST = cluster_pb2.CACHE_TIER_UNSPECIFIED, cluster_pb2.CACHE_TIER_HOST
DISK = cluster_pb2.CACHE_TIER_DISK
COMMITTED = kv_transfer_pb2.HANDOFF_STATE_COMMITTED
FAILED = kv_transfer_pb2.HANDOFF_STATE_FAILED
A, B, C = ("a", 1), ("b", 1), ("c", 1)
# A prompt token takes 1 ms to compute, and 0.01 ms to send at 10 GB/s.
MODEL = LatencyModel(0.02, 1e-3, 0.0, 0.030, 0.001, 1e-6)
PROMPT = list(range(3200))
DEMAND = Demand(len(PROMPT), 10, 3200, 10.0, 0.05)


def view(*names: str, **changes) -> FleetView:
    values = {
        "kv_bytes_per_token": 100_000,
        "host_kv_tokens": 65536,
        "host_bytes_per_s": 1e10,
        **changes,
    }
    found = FleetView(CoreClock(), 256, 256, StepTargets(0.05, 0.06, 0.2))
    for name in names:
        found.add_worker(
            (name, 1), WorkerTraits(FixedLatency(MODEL), name, 65536, BLOCK, **values), Pool.PREFILL
        )
    return found


def holds(found: FleetView, name: str, num_blocks: int, tier: int = DEVICE) -> None:
    hashes = block_hashes(PROMPT, BLOCK)[:num_blocks]
    found.apply_cache((name, 1), cluster_pb2.CacheEvents(stored=hashes, tier=tier))


def queue(found: FleetView, name: str, seconds: float, number: int = 1) -> None:
    for index in range(number):
        # Short prompts go first.
        choice = PrefillChoice((name, 1), 0.0, seconds, 10)
        found.assign_prefill(f"{name}{index}", choice, [])


def both(found: FleetView) -> list[PrefillChoice]:
    """The readers that the two kinds of cells choose."""
    match = found.match(block_hashes(PROMPT, BLOCK))
    placed = elastic_choices(found).place(match, DEMAND)
    assert not isinstance(placed, NoPlacement)
    return [pool_choices(found).choose_prefill(match, len(PROMPT)), placed.prefill]


@pytest.mark.parametrize("tier", [DEVICE, HOST])
def test_a_busy_worker_s_prefix_is_fetched_by_an_idle_one(tier):
    found = view("a", "b")
    holds(found, "b", 150, tier)
    queue(found, "b", 5.0, 4)
    for choice in both(found):
        fetch = choice.fetch
        assert choice.worker == A
        assert (fetch.holder, fetch.num_tokens, fetch.skip_tokens) == (B, 2400, 0)
        assert (choice.num_work_tokens, choice.hits.num_device) == (800, 0)
        assert choice.work_s == pytest.approx(MODEL.prefill_s(800))
        assert choice.ttft_s == pytest.approx(fetch.fetch_s + choice.work_s)
        # A fetch that takes longer than the computation that it saves is given up.
        saved_s = MODEL.prefill_s(3200) - MODEL.prefill_s(800)
        assert fetch.timeout_s == pytest.approx(max(saved_s, 2 * fetch.fetch_s))
        assert fetch.sending_s == pytest.approx(0.024)


def test_the_holder_itself_is_preferred_while_it_is_idle():
    found = view("a", "b")
    holds(found, "b", 150)
    for choice in both(found):
        assert (choice.worker, choice.fetch) == (B, None)


@pytest.mark.parametrize("num_held", [0, 50])
def test_the_least_that_is_worth_sending_takes_longer_to_compute_than_to_fetch(num_held):
    found = view("a", "b")
    holds(found, "a", num_held, HOST)
    holds(found, "b", 150)
    queue(found, "b", 5.0, 4)
    for choice in both(found):
        fetch = choice.fetch
        num_own = num_held * BLOCK
        least_s = (fetch.least_tokens - num_own) * 1e-3
        assert num_own < fetch.least_tokens < fetch.num_tokens
        assert fetch.fetch_s <= least_s < fetch.fetch_s + BLOCK * 1e-3


def test_the_reader_s_own_blocks_are_not_fetched():
    found = view("a", "b")
    holds(found, "a", 50)
    holds(found, "b", 150)
    queue(found, "b", 5.0, 4)
    for choice in both(found):
        assert (choice.worker, choice.fetch.skip_tokens, choice.fetch.num_tokens) == (A, 800, 2400)
        assert (choice.hits.num_device, choice.num_work_tokens) == (800, 800)


def test_the_reader_s_blocks_in_host_memory_are_loaded_beside_the_fetch():
    found = view("a", "b")
    holds(found, "a", 20)
    holds(found, "a", 50, HOST)
    holds(found, "b", 150)
    queue(found, "b", 5.0, 4)
    for choice in both(found):
        fetch = choice.fetch
        assert (choice.worker, fetch.num_tokens) == (A, 2400)
        assert (fetch.skip_tokens, fetch.host_tokens) == (800, 480)
        assert choice.hits[:2] == (320, 480)
        assert choice.num_work_tokens == 800


@pytest.mark.parametrize("changes", [{"host_bytes_per_s": 1e8}, {"disk_kv_tokens": 65536}])
def test_the_reader_s_blocks_are_fetched_where_its_own_load_takes_longer(changes):
    found = view("a", "b", **changes)
    holds(found, "a", 50, DISK if "disk_kv_tokens" in changes else HOST)
    holds(found, "b", 150)
    queue(found, "b", 5.0, 4)
    for choice in both(found):
        assert (choice.worker, choice.fetch.skip_tokens, choice.fetch.host_tokens) == (A, 0, 0)
        assert choice.fetch.num_sent_tokens == 2400


def test_nothing_is_fetched_if_workers_keep_windows_or_states():
    found = view("a", "b", sends_prefixes=False)
    holds(found, "b", 150)
    queue(found, "b", 5.0, 4)
    for choice in both(found):
        assert (choice.worker, choice.fetch) == (A, None)


def test_nothing_is_fetched_that_takes_longer_than_computing_it():
    found = view("a", "b")
    holds(found, "b", 150)
    queue(found, "b", 5.0, 4)
    found.transfers.observe((B, A), 10**9, 100.0, near=False)
    for choice in both(found):
        assert (choice.worker, choice.fetch) == (A, None)


def test_a_fetch_is_not_larger_than_the_staging_of_either_side():
    found = view("a", "b", max_send_bytes=100_000 * 1000)
    holds(found, "b", 150)
    queue(found, "b", 5.0, 4)
    for choice in both(found):
        assert (choice.fetch.num_tokens, choice.num_work_tokens) == (992, 2208)


def test_two_tokens_are_left_to_compute():
    found = view("a", "b")
    holds(found, "b", 200)
    queue(found, "b", 5.0, 4)
    for choice in both(found):
        assert (choice.fetch.num_tokens, choice.num_work_tokens) == (3184, 16)


def test_a_prefix_that_a_worker_only_expects_is_not_fetched_from_it():
    found = view("a", "b")
    queued = PrefillChoice(B, 0.0, 2.0, 20000)
    found.assign_prefill("other", queued, block_hashes(PROMPT, BLOCK)[:150])
    for choice in both(found):
        assert choice.fetch is None


def test_a_holder_that_gets_no_work_sends_nothing():
    found = view("a", "b")
    holds(found, "b", 150)
    found.loads.set_pool(B, None)
    for choice in both(found):
        assert (choice.worker, choice.fetch) == (A, None)


def test_a_holder_sends_one_prefix_after_the_other():
    found = view("a", "b", "c")
    holds(found, "b", 150)
    found.transfers.observe((B, A), 10**9, 0.1, near=False)
    queue(found, "b", 5.0, 4)
    first = both(found)[1]
    for number in range(20):
        found.assign_prefill(f"first{number}", first, [])
    queue(found, first.worker[0], 5.0, 4)
    second = both(found)[1]
    assert (first.worker, second.worker) in ((A, C), (C, A))
    # The holder's step of 0.2 s ends before it has sent the others.
    more_s = second.fetch.fetch_s - first.fetch.fetch_s
    assert more_s == pytest.approx(20 * first.fetch.sending_s - 0.3)


def test_speeds_are_measured_by_pair():
    found = Transfers(CoreClock())

    def seconds(pair, *, near=False):
        return found.seconds(pair, 10**9, near=near)

    assert seconds((A, B)) == pytest.approx(0.1)
    found.observe((A, B), 10**9, 1.0, near=False)
    assert seconds((A, B)) == pytest.approx(1.0)
    # Other pairs of different hosts are assumed to be as fast, those of one host are not.
    assert seconds((B, A)) == pytest.approx(1.0)
    assert seconds((B, A), near=True) == pytest.approx(0.1)
    found.observe((A, B), 10**9, 2.0, near=False)
    assert seconds((A, B)) == pytest.approx(1.3)
    # Small transfers say more about delays.
    found.observe((A, B), 1000, 2.0, near=False)
    assert seconds((A, B)) == pytest.approx(1.3)
    found.observe((B, C), 10**9, 0.3, near=False)
    assert seconds((B, C)) == pytest.approx(0.3)
    assert seconds((C, A)) == pytest.approx(1.0)
    found.forget(B)
    assert seconds((B, C)) == pytest.approx(1.0)


def test_handoffs_have_assumed_speeds_until_their_kind_is_measured():
    found = Transfers(CoreClock())
    found.begins(A, 0.1, near=False)
    assert found.handoff_s((A, B), 10**9, near=False) == pytest.approx(1.0)
    assert found.handoff_s((A, B), 10**9, near=True) == pytest.approx(0.2)
    found.observe((B, C), 10**9, 0.5, near=False)
    assert found.handoff_s((A, B), 10**9, near=False) == pytest.approx(0.5)
    assert found.handoff_s((A, B), 10**9, near=True) == pytest.approx(0.2)
    found.observe((A, B), 10**9, 0.1, near=False)
    assert found.handoff_s((A, B), 10**9, near=False) == pytest.approx(0.1)


def test_what_was_slow_is_tried_again_some_time():
    clock = CoreClock()
    found = Transfers(clock)
    found.observe_timeout((A, B), 10**9, 1.0, near=False)
    # It would have taken longer than it was waited for.
    assert found.seconds((A, B), 10**9, near=False) == pytest.approx(2.0)
    clock.now += 600
    assert found.seconds((A, B), 10**9, near=False) == pytest.approx(1.0)
    clock.now += 6000
    assert found.seconds((A, B), 10**9, near=False) == pytest.approx(0.1)


def test_a_network_faster_than_assumed_is_predicted_as_measured():
    clock = CoreClock()
    found = Transfers(clock)
    # 40 GB/s; the assumed speed is 10 GB/s.
    found.observe((A, B), 40 * 10**9, 1.0, near=False)
    assert found.seconds((A, B), 10**9, near=False) == pytest.approx(0.025)
    assert found.seconds((B, C), 10**9, near=False) == pytest.approx(0.025)
    clock.now += 6000
    assert found.seconds((A, B), 10**9, near=False) == pytest.approx(0.025)
    # A transfer in no time at all is a wrong measurement.
    found.observe((A, B), 10**9, 0.0, near=False)
    assert found.seconds((A, B), 10**9, near=False) == pytest.approx(0.025)


def test_a_network_faster_than_assumed_makes_fetches_pay():
    # A token takes 1 ms to compute, 2 ms to send at 10 GB/s, and 0.5 ms at 40 GB/s.
    found = view("a", "b", kv_bytes_per_token=20_000_000)
    holds(found, "b", 150)
    queue(found, "b", 5.0, 4)
    # A strict cell would fetch at 10 GB/s too, because it weighs computation more than waiting.
    _, elastic = both(found)
    assert (elastic.worker, elastic.fetch) == (A, None)
    found.transfers.observe((B, A), 40 * 10**9, 1.0, near=False)
    for choice in both(found):
        assert (choice.worker, choice.fetch.num_tokens) == (A, 2400)
        assert choice.fetch.sending_s == pytest.approx(1.2)


def test_a_handoff_shows_that_the_network_is_not_slower():
    found = Transfers(CoreClock())
    found.observe_timeout((A, B), 10**9, 1.0, near=False)
    found.observe_at_most((A, B), 10**9, 4.0, near=False)
    assert found.seconds((A, B), 10**9, near=False) == pytest.approx(2.0)
    found.observe_at_most((A, B), 10**9, 1.0, near=False)
    assert found.seconds((A, B), 10**9, near=False) == pytest.approx(1.7)


def test_the_first_fetch_is_tried_alone():
    found = Transfers(CoreClock())
    found.begins(A, 0.1, near=False)
    assert found.seconds((C, B), 10**9, near=False) == math.inf
    assert found.seconds((C, B), 10**9, near=True) == pytest.approx(0.1)
    # A small one shows nothing, and the next one may be tried.
    found.observe((A, B), 1000, 0.1, near=False)
    assert found.seconds((C, B), 10**9, near=False) == pytest.approx(0.1)
    found.begins(A, 0.1, near=False)
    assert found.seconds((C, B), 10**9, near=False) == math.inf
    found.observe((A, B), 10**9, 0.1, near=False)
    assert found.seconds((C, B), 10**9, near=False) == pytest.approx(0.1)


# ---- The core.

SIZE = 800
LONG = list(range(900))


def cell(new_world, **changes):
    """An elastic core in which "h" holds 800 tokens of the prompt and is busy."""
    world = new_world(elastic=True, latency=MODEL, **changes)
    for name in ("h", "r"):
        world.attach(name, common_pb2.ROLE_PREFILL)
    keep(world, "h", SIZE)
    # The holder's queue is long, so that the prompt is computed elsewhere.
    view_of(world).assign_prefill("other", PrefillChoice(("h", 1), 0.0, 9.0, 10), [])
    return world


def view_of(world):
    return world.core.placers.of(world.core.fleets.stable).view


def keep(world, worker, num_tokens):
    hashes = block_hashes(LONG[:num_tokens], BLOCK)
    world.handle(ev.WorkerCache((worker, 1), cluster_pb2.CacheEvents(stored=hashes)))


def report(world, worker, fetch, state, **changes):
    made = cluster_pb2.HandoffReport(
        request_id="r1", attempt=1, handoff_id=fetch.handoff_id, state=state, **changes
    )
    world.handle(ev.WorkerHandoff((worker, 1), made))


def first_output(world, out, worker, request="r1", **timings):
    world.step(worker, out(request, [5], timings=timings))


def test_the_holder_and_the_reader_are_told(new_world, out):
    world = cell(new_world)
    to = world.submit(num_prompt=900)
    (sent,), (read,) = world.commands["h"], world.commands["r"]
    assert isinstance(sent, cluster_pb2.SendPrefixCommand)
    assert list(sent.prompt_token_ids) == LONG[:SIZE]
    assert (sent.handoff.num_tokens, sent.handoff.target) == (SIZE, "r.test:1")
    assert sent.handoff.handoff_id == read.fetch.handoff_id
    assert (read.fetch.num_tokens, read.fetch.skip_tokens) == (SIZE, 0)
    assert 0 < read.fetch.timeout.ToNanoseconds() == sent.timeout.ToNanoseconds()
    assert 0 < sent.handoff.least_tokens < SIZE
    report(world, "h", read.fetch, COMMITTED)
    first_output(world, out, "r", num_fetched_tokens=SIZE)
    world.step("r", out("r1", [6], offset=1, finish=common_pb2.FINISH_REASON_STOP))
    assert world.last(to).usage.cached_prompt_tokens == SIZE
    (record,) = world.core.recently_ended()
    assert record.prompt_sources == (0, 0, 100, 0, 0, SIZE)
    assert (record.placement_prediction.num_fetched, record.placement_prediction.fetched_from) == (
        SIZE,
        "h",
    )
    assert record.placement_prediction.speeds == pytest.approx((0.0, 0.0, 1e10))
    assert world.core.stats.prompt_tokens["fetched"] == SIZE
    assert world.core.stats.fetches == {"loaded": 1, "failed": 0}
    assert world.core.stats.handoffs.total() == 0
    assert len(world.commands["h"]) == 1


def test_a_holder_that_lacks_blocks_shows_how_fast_the_rest_came(new_world, out):
    world = cell(new_world)
    world.submit(num_prompt=900)
    read = world.commands["r"][0]
    report(world, "h", read.fetch, COMMITTED, num_bytes=2**17, exposed_us=1000)
    first_output(world, out, "r", num_fetched_tokens=512)
    took_s = view_of(world).transfers.seconds((("h", 1), ("r", 1)), 2**17, near=True)
    assert took_s == pytest.approx(0.001)
    assert world.core.stats.fetches == {"loaded": 1, "failed": 0}
    assert world.core.stats.prompt_tokens["fetched"] == 512


def test_a_fetch_that_has_ended_keeps_no_request_and_still_shows_its_speed(new_world, out):
    """Ended fetches are remembered for late reports; thousands of long prompts would take GBs."""
    world = cell(new_world)
    world.submit(num_prompt=900)
    read = world.commands["r"][0]
    first_output(world, out, "r", num_fetched_tokens=SIZE)
    world.step("r", out("r1", [6], offset=1, finish=common_pb2.FINISH_REASON_STOP))
    gc.collect()
    fleets = list(world.core.fleets)
    requests = [one for one in gc.get_objects() if type(one) is Request]
    assert not [one for one in requests if one.fleet in fleets]
    report(world, "h", read.fetch, COMMITTED, num_bytes=2**17, exposed_us=1000)
    took_s = view_of(world).transfers.seconds((("h", 1), ("r", 1)), 2**17, near=True)
    assert took_s == pytest.approx(0.001)
    report(world, "r", read.fetch, FAILED)
    assert world.core.stats.handoffs.total() == 0


def test_a_burst_with_one_prefix_fetches_it_once(new_world, out):
    world = cell(new_world)
    for _ in range(3):
        world.submit(num_prompt=900)
    assert len(world.commands["h"]) == 1
    first, *others = world.commands["r"]
    assert len(others) == 2
    for other in others:
        assert other.fetch.handoff_id == first.fetch.handoff_id
        assert other.fetch.num_tokens == 0
        assert 0 < other.fetch.timeout.ToNanoseconds() <= first.fetch.timeout.ToNanoseconds()
    report(world, "h", first.fetch, COMMITTED)
    first_output(world, out, "r", num_fetched_tokens=SIZE)
    # The prefix is in the reader's cache now.
    keep(world, "r", SIZE)
    world.submit(num_prompt=900)
    assert not world.commands["r"][-1].HasField("fetch")


def test_a_prompt_with_another_beginning_does_not_wait_for_the_fetch(new_world):
    world = cell(new_world)
    world.submit(num_prompt=900)
    world.submit(prompt_token_ids=LONG[:40:-1][:40])
    assert len(world.commands["r"]) == 2
    assert not world.commands["r"][-1].HasField("fetch")


@pytest.mark.parametrize(("num_shared", "waits"), [(48, False), (640, True)])
def test_a_prompt_waits_for_a_fetch_only_if_it_computes_what_they_share_later(
    new_world, num_shared, waits
):
    """All conversations share a short system prompt, and few share more."""
    world = cell(new_world)
    world.submit(num_prompt=900)
    read = world.commands["r"][0].fetch
    world.submit(prompt_token_ids=[*LONG[:num_shared], *range(50)])
    (_, command) = world.commands["r"]
    assert command.HasField("fetch") == waits
    if waits:
        assert command.fetch.handoff_id == read.handoff_id
        assert 0 < command.fetch.timeout.ToNanoseconds() <= read.timeout.ToNanoseconds()


@pytest.mark.parametrize("by", ["report", "loss", "silence"])
def test_the_reader_does_not_wait_for_a_holder_that_sends_nothing(new_world, out, by):
    world = cell(new_world)
    world.attach("other", common_pb2.ROLE_PREFILL)
    world.submit(num_prompt=900)
    (name,) = (name for name in ("r", "other") if world.commands[name])
    (read,) = world.commands[name]
    if by == "report":
        report(world, "h", read.fetch, FAILED)
    elif by == "loss":
        world.handle(ev.WorkerLost("h", "was killed"))
    else:
        world.wait(60, silent=["h"])
    drop = world.commands[name][1]
    assert (drop.request_id, drop.attempt, drop.handoff_id) == ("r1", 0, read.fetch.handoff_id)
    assert len(world.commands[name]) == 2
    first_output(world, out, name)
    assert world.core.stats.fetches == {"loaded": 0, "failed": 1}
    assert world.core.stats.prompt_tokens["computed"] == 900


@pytest.mark.parametrize("by", ["cancel", "reader", "report"])
def test_the_holder_is_told_when_nobody_waits_for_its_blocks(new_world, by):
    world = cell(new_world)
    to = world.submit(num_prompt=900)
    fetch = world.commands["r"][0].fetch
    if by == "cancel":
        world.handle(ev.StreamCancelled(to))
    elif by == "reader":
        world.handle(ev.WorkerLost("r", "was killed"))
    else:
        report(world, "r", fetch, FAILED)
    cancel = world.commands["h"][1]
    assert (cancel.request_id, cancel.attempt) == ("", 0)
    assert cancel.handoff_id == fetch.handoff_id


def test_a_slow_worker_is_asked_less(new_world, out):
    """A fetch that is not there in time shows how slow the network is."""
    world = cell(new_world)
    world.submit(num_prompt=900)
    read = world.commands["r"][0]
    world.after(to_seconds(read.fetch.timeout) + 0.01)
    first_output(world, out, "r")
    assert world.commands["h"][1].handoff_id == read.fetch.handoff_id
    num_bytes = 10**9
    took_s = view_of(world).transfers.seconds((("h", 1), ("r", 1)), num_bytes, near=True)
    timeout_s = to_seconds(read.fetch.timeout)
    assert took_s == pytest.approx(2 * timeout_s / (SIZE * 256) * num_bytes)


@pytest.mark.parametrize(
    "changes", [{"fetch": False}, {"sampling": {"prompt_logprobs": 1}}], ids=["off", "logprobs"]
)
def test_nothing_is_fetched_that_must_not_be(new_world, changes):
    world = cell(new_world, fetch=changes.pop("fetch", True))
    world.submit(num_prompt=900, **changes)
    assert not world.commands["h"]
    assert not world.commands["r"][0].HasField("fetch")


def test_nothing_is_fetched_from_another_revision(two_fleets):
    fleets = two_fleets(latency=MODEL, local_prefill=False)
    world = fleets.world
    hashes = block_hashes(LONG[:SIZE], BLOCK)
    for tier in (DEVICE, HOST, DISK):
        changes = cluster_pb2.CacheEvents(stored=hashes, tier=tier)
        world.handle(ev.WorkerCache(("d", 1), changes))
    to = world.submit(num_prompt=900)
    assert fleets.fleet_name(to) == "r2"
    every = [one for commands in world.commands.values() for one in commands]
    (prompt,) = [one for one in every if isinstance(one, cluster_pb2.PrefillCommand)]
    assert not prompt.HasField("fetch")


def test_a_decode_worker_sends_what_it_has_back_to_the_prefill_pool(new_world):
    world = new_world(local_prefill=False, latency=MODEL).pair()
    keep(world, "d", SIZE)
    world.submit(num_prompt=900)
    (sent,), (read,) = world.commands["d"], world.commands["p"]
    assert isinstance(sent, cluster_pb2.SendPrefixCommand)
    assert sent.handoff.target == "p.test:1"
    assert read.fetch.handoff_id == sent.handoff.handoff_id
    # The decode worker still has what it sent.
    assert read.handoff.skip_tokens == SIZE


def test_the_prompt_of_a_second_attempt_is_counted_too(new_world, out):
    world = cell(new_world)
    world.attach("x", common_pb2.ROLE_PREFILL)
    to = world.submit(num_prompt=900)
    (request,) = world.core.running()
    report(world, "h", request.fetch, COMMITTED)
    first = request.decode
    first_output(world, out, first[0], num_fetched_tokens=SIZE)
    world.handle(ev.WorkerLost(first[0], "was killed"))
    second = request.decode
    assert second != first
    report(world, "h", request.fetch, COMMITTED)
    timings = {"num_cached_tokens": BLOCK, "num_fetched_tokens": SIZE - BLOCK}
    world.step(second[0], out("r1", [6], offset=1, attempt=2, timings=timings))
    assert request.fetch is None
    assert request.prompt_sources == (BLOCK, 0, 100, 0, 0, SIZE - BLOCK)
    counts = {"device": BLOCK, "host": 0, "disk": 0, "fetched": 2 * SIZE - BLOCK, "computed": 200}
    assert world.core.stats.prompt_tokens == counts
    assert world.core.stats.fetches == {"loaded": 2, "failed": 0}
    finish = common_pb2.FINISH_REASON_LENGTH
    world.step(second[0], out("r1", [7], offset=2, attempt=2, finish=finish))
    assert world.last(to).usage.cached_prompt_tokens == SIZE


@pytest.mark.parametrize("seed", range(8))
def test_every_fetch_ends_whatever_happens(new_world, out, seed):
    """World.handle checks after each event that each fetch belongs to a request."""
    rng = random.Random(seed)
    world = new_world(elastic=rng.random() < 0.7, latency=MODEL, local_prefill=False)
    names = ["w0", "w1", "w2", "w3"]
    incarnations = dict.fromkeys(names, 0)
    # Fetches that the holders have neither reported nor been told to forget.
    open_at: dict[bytes, str] = {}
    told = dict.fromkeys(names, 0)

    def read_commands():
        for name in names:
            for command in world.commands[name][told[name] :]:
                if isinstance(command, cluster_pb2.SendPrefixCommand):
                    open_at[command.handoff.handoff_id] = name
                elif isinstance(command, cluster_pb2.CancelCommand) and not command.request_id:
                    open_at.pop(command.handoff_id, None)
            told[name] = len(world.commands[name])

    def attach(name):
        incarnations[name] += 1
        role = common_pb2.ROLE_DECODE if name in ("w2", "w3") else common_pb2.ROLE_PREFILL
        world.attach(name, role, incarnations[name])
        hashes = block_hashes(LONG[: BLOCK * rng.choice([0, 20, 50])], BLOCK)
        changes = cluster_pb2.CacheEvents(stored=hashes)
        world.handle(ev.WorkerCache((name, incarnations[name]), changes))

    for name in names:
        attach(name)
    num_fetches = 0
    for _ in range(300):
        read_commands()
        num_fetches += len(open_at)
        what, name = rng.random(), rng.choice(names)
        running = world.core.running()
        if what < 0.35:
            world.submit(prompt_token_ids=LONG[: rng.randint(300, 900)])
        elif what < 0.45 and running:
            world.handle(ev.RequestCancelled(rng.choice(running).key))
        elif what < 0.6 and open_at:
            handoff_id, holder = rng.choice(list(open_at.items()))
            made = cluster_pb2.HandoffReport(
                handoff_id=handoff_id, state=rng.choice([COMMITTED, FAILED]), num_bytes=2**20
            )
            del open_at[handoff_id]
            world.handle(ev.WorkerHandoff((holder, incarnations[holder]), made))
        elif what < 0.65:
            plans = [one.fetch for one in running if one.fetch is not None and one.fetch.num_tokens]
            if plans:
                made = cluster_pb2.HandoffReport(
                    handoff_id=rng.choice(plans).handoff_id, state=FAILED
                )
                # The worker that reports may be the holder.
                if open_at.get(made.handoff_id) == name:
                    del open_at[made.handoff_id]
                world.handle(ev.WorkerHandoff((name, incarnations[name]), made))
        elif what < 0.85 and running:
            request = rng.choice(running)
            reader = request.prefill or request.decode
            if reader is not None and request.prefill_timings is request.decode_timings is None:
                timings = {"num_fetched_tokens": rng.choice([0, 320])}
                attempt = request.attempt_number
                first = out(request.key, [5], attempt=attempt, timings=timings, finish=0)
                if request.prefill is None:
                    first.ClearField("finished")
                world.step(reader[0], first, incarnation=reader[1])
        elif what < 0.9:
            world.handle(ev.WorkerLost(name, "was killed"))
            open_at = {one: holder for one, holder in open_at.items() if holder != name}
            attach(name)
        else:
            world.after(rng.choice([0.05, 1.0]))
            for each in names:
                world.handle(ev.WorkerHeard((each, incarnations[each])))
    for request in world.core.running():
        world.handle(ev.RequestCancelled(request.key))
    read_commands()
    assert num_fetches
    assert not open_at
