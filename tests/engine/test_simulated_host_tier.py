"""The simulated engine's KV store in host memory: stores, loads, evictions and reports."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.base import NO_LOADS, EngineOutput, EngineRequest, EngineStep
from baton.engine.sim_host_tier import HostTier
from baton.engine.sim_tokens import Vocabulary, expected_tokens
from baton.engine.simulated import SimulatedEngine
from baton.kvtransfer.block_changes import CacheChange
from baton.runtime import demo_model
from baton.runtime.config import SimulatedConfig
from baton.runtime.prompts.block_hashes import block_hashes
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import common_pb2

BLOCK = 16
SETTINGS = SimulatedConfig(time_scale=0, max_model_len=256, kv_tokens=256, max_num_seqs=8)
# One block is 4,096 bytes, so that a load of 6 blocks takes about 0.6 s.
SLOW = SETTINGS.model_copy(update={"time_scale": 1, "host_bytes_per_s": 40_000})
FIRST, SECOND = list(range(10, 106)), list(range(110, 206))


class Run:
    """An engine, its requests, and its tiers as its reports say."""

    def __init__(self, engine: SimulatedEngine, vocabulary: Vocabulary) -> None:
        self.engine, self.vocabulary = engine, vocabulary
        self.cached, self.kept = set[int](), set[int]()
        self.outputs: dict[str, list[EngineOutput]] = {}
        self.ended = list[str]()

    async def submit(self, name: str, prompt: Sequence[int], num_tokens: int) -> None:
        sampling = common_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        self.outputs[name] = []
        await self.engine.submit(EngineRequest(name, prompt, sampling))

    async def step(self) -> EngineStep:
        step = await self.engine.next_step()
        for tier, change in ((self.cached, step.cache), (self.kept, step.host_cache)):
            apply(tier, change)
        for output in step.outputs:
            self.outputs[output.engine_request_id].append(output)
            if output.finish is not None:
                self.ended.append(output.engine_request_id)
        return step

    async def until_ended(self, *names: str) -> None:
        while not set(names) <= set(self.ended):
            await self.step()
            self.engine.check_integrity()

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    async def whole(self, prompt: Sequence[int], num_tokens: int = 1) -> EngineOutput:
        """Runs a request to its end; returns its first output."""
        name = f"whole-{len(self.outputs)}"
        await self.submit(name, prompt, num_tokens)
        await self.until_ended(name)
        assert self.tokens(name) == expected_tokens(self.vocabulary, prompt, num_tokens)
        return self.outputs[name][0]


def apply(tier: set[int], change: CacheChange | None) -> None:
    if change is not None:
        assert tier.issuperset(change.removed)
        tier.difference_update(change.removed)
        tier.update(change.stored)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    root: Path = tmp_path_factory.mktemp("model")
    return demo_model.ensure("demo", weights=False, root=root)


async def started(
    model: str, settings: SimulatedConfig = SETTINGS, host_kv_tokens: int = 4096
) -> Run:
    engine = SimulatedEngine(model, "m", settings, "", host_kv_tokens=host_kv_tokens)
    info = await engine.start()
    assert info.host_kv_tokens == host_kv_tokens
    return Run(engine, Vocabulary.load(model))


@pytest.fixture
async def run(model: str) -> AsyncIterator[Run]:
    found = await started(model)
    yield found
    await found.engine.stop()
    found.engine.check_integrity()


async def test_an_evicted_prefix_is_loaded_and_not_computed_again(run: Run) -> None:
    for prompt in (FIRST, SECOND, [3] * 160):
        await run.whole(prompt)
    hashes = block_hashes(FIRST, BLOCK)
    assert not run.cached.issuperset(hashes)
    assert run.kept.issuperset(hashes)
    run.engine.take_load()
    found = await run.whole([*FIRST, 1, 2])
    assert found.num_host_tokens > 0
    assert found.num_cached_tokens + found.num_host_tokens == len(FIRST)
    load = run.engine.take_load()
    assert [one.num_prefill_tokens for one in load.samples] == [2]
    # A block has four layers.
    num_blocks = found.num_host_tokens // BLOCK
    assert load.host_loads.num_bytes == num_blocks * 4 * SETTINGS.block_bytes
    assert run.engine.take_load().host_loads == NO_LOADS
    # The loaded blocks are on the device again.
    again = await run.whole([*FIRST, 1, 2])
    assert (again.num_cached_tokens, again.num_host_tokens) == (len(FIRST), 0)


async def test_an_output_is_kept_for_the_next_turn(run: Run) -> None:
    prompt = FIRST[:20]
    await run.whole(prompt, 60)
    await run.whole([3] * 250)
    turn = [*prompt, *expected_tokens(run.vocabulary, prompt, 60), 7, 8]
    found = await run.whole(turn)
    # The last token of an output is never computed: 79 tokens are 4 full blocks.
    assert found.num_cached_tokens + found.num_host_tokens == 64
    assert found.num_host_tokens > 0


async def test_without_host_memory_an_evicted_prefix_is_computed_again(model: str) -> None:
    run = await started(model, host_kv_tokens=0)
    for prompt in (FIRST, SECOND, [3] * 250):
        await run.whole(prompt)
    found = await run.whole(FIRST)
    assert (found.num_cached_tokens, found.num_host_tokens) == (0, 0)
    assert not run.kept
    await run.engine.stop()


async def test_a_full_tier_evicts_the_longest_unused_prefix_from_its_end(model: str) -> None:
    run = await started(model, host_kv_tokens=160)
    await run.whole(FIRST)
    await run.whole(SECOND)
    kept = [one for one in block_hashes(FIRST, BLOCK) if one in run.kept]
    assert kept == list(block_hashes(FIRST, BLOCK)[:4])
    await run.whole([3] * 250)
    assert len(run.kept) == 10
    found = await run.whole(FIRST)
    assert found.num_cached_tokens + found.num_host_tokens == 0
    await run.engine.stop()


async def test_a_load_delays_no_other_request(model: str) -> None:
    run = await started(model, SLOW)
    for prompt in (FIRST, [3] * 250):
        await run.whole(prompt)
    await run.submit("loads", FIRST, 1)
    await run.submit("other", SECOND[:40], 3)
    await run.until_ended("loads", "other")
    assert run.ended[-2:] == ["other", "loads"]
    assert run.outputs["loads"][0].num_host_tokens == 80
    loads = run.engine.take_load().host_loads
    assert loads.num_bytes / loads.seconds == pytest.approx(SLOW.host_bytes_per_s)
    await run.engine.stop()


@pytest.mark.parametrize("way", ["abort", "stop"])
async def test_a_load_that_ends_early_leaves_nothing_behind(model: str, way: str) -> None:
    run = await started(model, SLOW)
    for prompt in (FIRST, [3] * 250):
        await run.whole(prompt)
    await run.submit("loads", FIRST, 1)
    # The other request needs a step, at the begin of which the load begins too.
    await run.whole(SECOND[:20], 2)
    assert run.engine.take_load().num_waiting == 1
    if way == "abort":
        await run.engine.abort(["loads"])
        run.engine.check_integrity()
        assert run.engine.take_load().kv_tokens_used == 0
        assert (await run.whole(FIRST)).num_host_tokens == 80
    await run.engine.stop()
    run.engine.check_integrity()


@pytest.mark.parametrize("limits_steps", [False, True])
async def test_streams_are_the_same_with_and_without_host_memory(model, limits_steps) -> None:
    """Conversations of several turns in a cache that holds few of them."""
    settings = SETTINGS
    if limits_steps:
        settings = SETTINGS.model_copy(update={"time_scale": 0.01})
    computed = list[int]()
    for host_kv_tokens in (0, 512, 65536):
        run = await started(model, settings, host_kv_tokens)
        run.engine.set_step_targets(StepTargets(0.05, 0.06, 0.2))
        chance, num_computed = random.Random(1), 0
        turns = {name: [chance.randrange(5, 200) for _ in range(30)] for name in "abcdef"}
        for turn in range(4):
            for name, prompt in turns.items():
                await run.submit(f"{name}{turn}", prompt, 12)
            await run.until_ended(*(f"{name}{turn}" for name in turns))
            for name, prompt in turns.items():
                first = run.outputs[f"{name}{turn}"][0]
                num_computed += len(prompt) - first.num_cached_tokens - first.num_host_tokens
                answer = expected_tokens(run.vocabulary, prompt, 12)
                assert run.tokens(f"{name}{turn}") == answer
                turns[name] = [*prompt, *answer, chance.randrange(5, 200)]
        assert run.engine.take_load().kv_tokens_used == 0
        computed.append(num_computed)
        await run.engine.stop()
    assert computed[0] > computed[2]


_ACTIONS = st.lists(
    st.tuples(st.sampled_from(["store", "load", "end"]), st.integers(0, 5), st.integers(1, 6)),
    max_size=60,
)


@given(_ACTIONS, st.integers(1, 12))
def test_blocks_being_loaded_stay_and_reports_tell_the_tier(actions, num_blocks) -> None:
    """Requests of prompts that share prefixes: number 4 begins as number 1 does, 5 as 2."""
    tier, known = HostTier(num_blocks), set[int]()
    loads: dict[str, list[int]] = {}
    for kind, number, size in actions:
        name, hashes = f"r{number}", [10 * (number % 3) + block for block in range(6)]
        if kind == "store":
            tier.store(hashes[:size], 0)
        elif kind == "load" and name not in loads:
            held = hashes[: tier.num_held(hashes, 0)]
            if held:
                tier.begin_load(name, held)
                loads[name] = held
        elif kind == "end":
            tier.end_load(name)
            loads.pop(name, None)
        tier.check_integrity()
        change = tier.take_change()
        if change is not None:
            known = known - set(change.removed) | set(change.stored)
        assert len(known) == len(tier) <= num_blocks
        assert all(tier.holds(block) for block in known)
        assert all(known.issuperset(held) for held in loads.values())
