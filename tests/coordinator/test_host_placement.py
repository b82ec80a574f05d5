"""Placement weighs blocks in host memory or on disk: loading them, or computing them elsewhere."""

from __future__ import annotations

import pytest

from baton.coordinator.routing.choices import PrefillChoice
from baton.coordinator.routing.elastic.candidates import Demand
from baton.coordinator.routing.fleet_view import FleetView
from baton.coordinator.routing.loads.worker_load import WorkerLoad
from baton.coordinator.routing.loads.worker_traits import WorkerTraits
from baton.coordinator.routing.prefixes.prefix_match import HeldPrefix
from baton.coordinator.state import events as ev
from baton.coordinator.state.core_clock import CoreClock
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.requests import PromptHits
from baton.runtime.prompts.block_hashes import block_hashes
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import cluster_pb2, common_pb2
from tests.coordinator.fixed_latency import FixedLatency
from tests.coordinator.worker_choices import elastic_choices, pool_choices

BLOCK = 16
_TIERS = [
    cluster_pb2.CACHE_TIER_UNSPECIFIED,
    cluster_pb2.CACHE_TIER_HOST,
    cluster_pb2.CACHE_TIER_DISK,
]
PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
# A prompt token takes 0.1 ms to compute and 0.01 ms to load.
MODEL = LatencyModel(0.02, 1e-4, 0.0, 0.030, 0.001, 1e-6)
PROMPT = list(range(3200))
DEMAND = Demand(len(PROMPT), 10, 3200, 10.0, 0.05)


def traits(**changes) -> WorkerTraits:
    values = {
        "kv_bytes_per_token": 100_000,
        "host_kv_tokens": 65536,
        "host_bytes_per_s": 1e10,
        "disk_kv_tokens": 65536,
        "disk_bytes_per_s": 1e10,
        **changes,
    }
    return WorkerTraits(FixedLatency(MODEL), "h", 65536, BLOCK, **values)


def load_of(kind: WorkerTraits) -> WorkerLoad:
    return WorkerLoad(("a", 1), kind, 1)


def view(*names: str, **changes) -> FleetView:
    found = FleetView(CoreClock(), 256, 256, StepTargets(0.05, 0.06, 0.2))
    for name in names:
        found.add_worker((name, 1), traits(**changes), Pool.PREFILL)
    return found


def holds(found: FleetView, name: str, num_blocks: int, tier: int, begin: int = 0) -> None:
    hashes = block_hashes(PROMPT, BLOCK)[begin:num_blocks]
    found.apply_cache((name, 1), cluster_pb2.CacheEvents(stored=hashes, tier=tier))


def test_a_prompt_saves_its_device_blocks_and_loads_the_host_blocks_behind_them():
    kind = traits()
    assert kind.hits(HeldPrefix(2, 5), 1000) == PromptHits(32, 48)
    assert kind.hits(HeldPrefix(2, 5), 40) == PromptHits(32, 8)
    assert kind.hits(HeldPrefix(5, 5), 48) == PromptHits(48, 0)
    load = load_of(kind)
    assert load.tier_load_s(PromptHits(), 0.0) == 0
    assert load.tier_load_s(PromptHits(0, 1000), 0.0) == pytest.approx(0.01, abs=0.002)
    assert load.prompt_s(100, PromptHits(32, 48), 0.0) == pytest.approx(
        MODEL.prefill_s(20) + load.tier_load_s(PromptHits(0, 48), 0.0)
    )


def test_blocks_on_disk_take_longer_than_those_in_host_memory():
    kind = traits(disk_bytes_per_s=1e9)
    assert kind.hits(HeldPrefix(2, 5, 2), 1000) == PromptHits(32, 16, 32)
    assert kind.hits(HeldPrefix(2, 5, 2), 40) == PromptHits(32, 0, 8)
    load = load_of(kind)
    assert load.tier_load_s(PromptHits(0, 0, 1000), 0.0) == pytest.approx(0.1 + 0.01, abs=0.002)
    assert load.tier_load_s(PromptHits(0, 500, 500), 0.0) == pytest.approx(0.05 + 0.01, abs=0.002)
    assert load.prompt_s(100, PromptHits(32, 16, 32), 0.0) == pytest.approx(
        MODEL.prefill_s(20) + load.tier_load_s(PromptHits(0, 16, 32), 0.0)
    )
    found = view("a", "b", "c", disk_bytes_per_s=1e9)
    holds(found, "b", 150, cluster_pb2.CACHE_TIER_DISK)
    holds(found, "c", 150, cluster_pb2.CACHE_TIER_HOST)
    match = found.match(block_hashes(PROMPT, BLOCK))
    assert pool_choices(found, fetches=False).choose_prefill(match, len(PROMPT)).worker == ("c", 1)


@pytest.mark.parametrize("tier", _TIERS)
def test_a_worker_that_holds_the_prefix_in_any_tier_is_preferred(tier):
    found = view("a", "b", "c")
    holds(found, "b", 150, tier)
    match = found.match(block_hashes(PROMPT, BLOCK))
    choice = pool_choices(found, fetches=False).choose_prefill(match, len(PROMPT))
    assert choice.worker == ("b", 1)
    assert choice.hits == tuple(2400 if one == tier else 0 for one in _TIERS)
    assert choice.num_work_tokens == 800
    load_s = load_of(traits()).tier_load_s(choice.hits, 0.0)
    assert choice.ttft_s == pytest.approx(MODEL.prefill_s(800) + load_s)
    placed = elastic_choices(found, fetches=False).place(match, DEMAND)
    assert placed.prefill == choice


def test_blocks_on_the_device_are_preferred_to_blocks_in_host_memory():
    found = view("a", "b", "c")
    holds(found, "a", 150, cluster_pb2.CACHE_TIER_HOST)
    holds(found, "b", 150, cluster_pb2.CACHE_TIER_UNSPECIFIED)
    holds(found, "c", 150, cluster_pb2.CACHE_TIER_HOST)
    match = found.match(block_hashes(PROMPT, BLOCK))
    assert pool_choices(found, fetches=False).choose_prefill(match, len(PROMPT)).worker == ("b", 1)
    placed = elastic_choices(found, fetches=False).place(match, DEMAND)
    assert placed.prefill.worker == ("b", 1)


def test_a_slow_load_is_not_preferred_to_computing():
    found = view("a", "b", host_bytes_per_s=1e8)
    holds(found, "b", 150, cluster_pb2.CACHE_TIER_HOST)
    match = found.match(block_hashes(PROMPT, BLOCK))
    placed = elastic_choices(found, fetches=False).place(match, DEMAND)
    assert placed.prefill.worker == ("a", 1)


@pytest.mark.parametrize("tier", [cluster_pb2.CACHE_TIER_HOST, cluster_pb2.CACHE_TIER_DISK])
def test_a_worker_whose_loads_were_slow_gets_no_prompt_that_needs_one(tier):
    found = view("a", "b")
    choices = elastic_choices(found, fetches=False)
    holds(found, "b", 150, tier)
    match = found.match(block_hashes(PROMPT, BLOCK))
    assert choices.place(match, DEMAND).prefill.worker == ("b", 1)
    slow, none = cluster_pb2.TierLoads(num_bytes=10**8, duration_us=10**6), cluster_pb2.TierLoads()
    loads = (slow, none) if tier == cluster_pb2.CACHE_TIER_HOST else (none, slow)
    found.report_tier_loads(("b", 1), *loads)
    assert choices.place(match, DEMAND).prefill.worker == ("a", 1)
    assert pool_choices(found, fetches=False).choose_prefill(match, len(PROMPT)).worker == ("a", 1)


def test_a_tier_that_the_coordinator_does_not_know_is_ignored():
    found = view("a")
    holds(found, "a", 150, 6)
    assert found.match(block_hashes(PROMPT, BLOCK)).held_by(("a", 1)) == HeldPrefix(0, 0)


@pytest.mark.parametrize("num_queued", [0, 1, 8, 20])
def test_a_host_hit_is_left_when_the_queue_is_longer_than_what_it_saves(num_queued):
    found = view("a", "b")
    holds(found, "b", 150, cluster_pb2.CACHE_TIER_HOST)
    queued = PrefillChoice(("b", 1), 0.0, 0.1, 800)
    for number in range(num_queued):
        found.assign_prefill(f"q{number}", queued, [])
    match = found.match(block_hashes(PROMPT, BLOCK))
    choices = elastic_choices(found, fetches=False)
    soonest = choices.soonest(match, len(PROMPT), "")
    # The hit saves 2,400 tokens: 240 ms less 25 ms for the load.
    assert soonest.worker == (("b", 1) if num_queued <= 1 else ("a", 1))
    # Work counts more than waiting: computing the tokens again also delays others.
    placed = choices.place(match, DEMAND)
    assert placed.prefill.worker == (("b", 1) if num_queued <= 1 else ("a", 1))
    weighed = pool_choices(found, fetches=False).choose_prefill(match, len(PROMPT))
    assert weighed.worker == (("b", 1) if num_queued <= 8 else ("a", 1))


def cell(new_world, **changes):
    """A core with workers "p" and "d" that have a KV store in host memory."""
    world = new_world(**changes)
    capacity = cluster_pb2.Capacity(
        kv_tokens=65536,
        host_kv_tokens=4096,
        disk_kv_tokens=4096,
        block_size_tokens=BLOCK,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_send_bytes=2**20,
        max_receive_bytes=2**20,
        supports_forced_tokens=True,
        keeps_prefixes=True,
    )
    world.attach("p", PREFILL, capacity=capacity)
    world.attach("d", DECODE, capacity=capacity)
    return world


def keeps(world, worker: str, num_blocks: int, tier: int) -> None:
    hashes = block_hashes(range(num_blocks * BLOCK), BLOCK)
    world.handle(ev.WorkerCache((worker, 1), cluster_pb2.CacheEvents(stored=hashes, tier=tier)))


@pytest.mark.parametrize(
    ("tier", "skipped"),
    [(_TIERS[0], 64), (_TIERS[1], 0), (_TIERS[2], 0)],
)
def test_a_handoff_leaves_out_only_what_the_receiver_has_on_its_device(new_world, tier, skipped):
    world = cell(new_world, local_prefill=False)
    keeps(world, "d", 4, tier)
    world.submit(num_prompt=100)
    (command,) = world.commands["p"]
    assert command.handoff.skip_tokens == skipped


@pytest.mark.parametrize("holder", ["p", "d"])
@pytest.mark.parametrize("tier", _TIERS[1:])
def test_the_next_turn_of_a_conversation_goes_to_the_worker_that_kept_it(new_world, holder, tier):
    world = cell(new_world, elastic=True)
    keeps(world, holder, 50, tier)
    world.submit(num_prompt=900)
    (request,) = world.core.running()
    predicted = request.placement_prediction
    assert predicted.prompt_worker == holder
    assert predicted.hits == tuple(800 if one == tier else 0 for one in _TIERS)


def test_usage_and_explain_count_tokens_of_every_tier(new_world, out):
    world = new_world().pair()
    to = world.submit(num_prompt=100)
    timings = {"num_cached_tokens": 32, "num_host_tokens": 32, "num_disk_tokens": 16}
    world.step("p", out("r1", [5], finish=common_pb2.FINISH_REASON_STOP, timings=timings))
    assert world.last(to).usage.cached_prompt_tokens == 80
    (record,) = world.core.recently_ended()
    assert record.prompt_sources == (32, 32, 20, 0, 16, 0)
    counts = {"device": 32, "host": 32, "disk": 16, "fetched": 0, "computed": 20}
    assert world.core.stats.prompt_tokens == counts
