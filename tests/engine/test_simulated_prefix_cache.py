"""Prefix caching in the simulated engine: reuse, eviction and reports."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.base import EngineOutput, EngineRequest
from baton.engine.sim_blocks import BlockPool
from baton.engine.sim_tokens import Vocabulary, expected_tokens
from baton.engine.simulated import SimulatedEngine
from baton.kvtransfer.block_changes import CacheChange
from baton.runtime import demo_model
from baton.runtime.config import SimulatedConfig
from baton.runtime.prompts.block_hashes import block_hashes
from baton.v1 import common_pb2

BLOCK = 16
SETTINGS = SimulatedConfig(time_scale=0, max_model_len=256, kv_tokens=256, max_num_seqs=8)


class Watched:
    """An engine, and the content of its cache as its reports say."""

    def __init__(self, engine: SimulatedEngine, vocabulary: Vocabulary) -> None:
        self.engine, self.vocabulary = engine, vocabulary
        self.cached: set[int] = set()

    async def run(self, prompt: list[int], num_tokens: int, **more: object) -> EngineOutput:
        """Runs a request to its end; returns its first output."""
        sampling = common_pb2.SamplingParams(max_tokens=num_tokens, **more)
        await self.engine.submit(EngineRequest("r", prompt, sampling))
        outputs: list[EngineOutput] = []
        while not outputs or outputs[-1].finish is None:
            step = await self.engine.next_step()
            self.apply(step.cache)
            outputs += step.outputs
        tokens = [token for output in outputs for token in output.token_ids]
        assert tokens == expected_tokens(self.vocabulary, prompt, num_tokens)
        self.engine.check_integrity()
        return outputs[0]

    def apply(self, change: CacheChange | None) -> None:
        if change is not None:
            assert self.cached.issuperset(change.removed) or not change.removed
            self.cached.difference_update(change.removed)
            self.cached.update(change.stored)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    root: Path = tmp_path_factory.mktemp("model")
    return demo_model.ensure("demo", weights=False, root=root)


@pytest.fixture
async def watched(model: str) -> AsyncIterator[Watched]:
    engine = SimulatedEngine(model, "m", SETTINGS, "")
    await engine.start()
    yield Watched(engine, Vocabulary.load(model))
    await engine.stop()
    engine.check_integrity()


async def test_a_prefix_is_computed_once(watched: Watched) -> None:
    prompt = list(range(10, 110))
    assert (await watched.run(prompt, 1)).num_cached_tokens == 0
    assert watched.cached == set(block_hashes(prompt, BLOCK))
    watched.engine.take_load()
    assert (await watched.run([*prompt, 1, 2], 1)).num_cached_tokens == 96
    assert [one.num_prefill_tokens for one in watched.engine.take_load().samples] == [6]
    # The last token is always computed.
    assert (await watched.run(prompt[:96], 1)).num_cached_tokens == 80
    assert (await watched.run([5, *prompt], 1)).num_cached_tokens == 0
    assert watched.engine.take_load().kv_tokens_used == 0


async def test_outputs_are_part_of_the_next_turns_prefix(watched: Watched) -> None:
    prompt = list(range(10, 30))
    await watched.run(prompt, 40)
    turn = [*prompt, *expected_tokens(watched.vocabulary, prompt, 40), 7, 8]
    # The last token of an output is never computed: 59 tokens are 3 full blocks.
    assert (await watched.run(turn, 1)).num_cached_tokens == 48


async def test_the_longest_unused_prefix_is_evicted_first_from_its_end(watched: Watched) -> None:
    first, second = list(range(10, 106)), list(range(110, 206))
    await watched.run(first, 1)
    await watched.run(second, 1)
    # The cache has 16 blocks; this prompt needs the last few of the first prompt's.
    await watched.run([3] * 100, 1)
    kept = [one for one in block_hashes(first, BLOCK) if one in watched.cached]
    assert 0 < len(kept) < 6
    assert kept == list(block_hashes(first, BLOCK)[: len(kept)])
    assert watched.cached.issuperset(block_hashes(second, BLOCK))
    assert (await watched.run(first, 1)).num_cached_tokens == len(kept) * BLOCK


async def test_prompt_logprobs_need_the_whole_prompt(watched: Watched) -> None:
    prompt = list(range(10, 60))
    await watched.run(prompt, 1)
    assert (await watched.run(prompt, 1, prompt_logprobs=1)).num_cached_tokens == 0


async def test_caching_can_be_switched_off(model: str) -> None:
    settings = SETTINGS.model_copy(update={"prefix_caching": False})
    engine = SimulatedEngine(model, "m", settings, "")
    await engine.start()
    watched = Watched(engine, Vocabulary.load(model))
    for _ in range(2):
        assert (await watched.run(list(range(10, 110)), 1)).num_cached_tokens == 0
    assert watched.cached == set()
    await engine.stop()


_ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["start", "grow", "cache", "free"]), st.integers(0, 5), st.integers(1, 6)
    ),
    max_size=50,
)


@given(_ACTIONS)
def test_blocks_are_never_lost_and_reports_tell_the_cache(actions) -> None:
    """Requests of prompts that share prefixes: number 4 begins as number 1 does, 5 as 2."""
    pool, known = BlockPool(10, 1), set[int]()
    sizes: dict[str, int] = {}
    for kind, number, size in actions:
        name, hashes = f"r{number}", [10 * (number % 3) + block for block in range(6)]
        if kind == "start" and name not in sizes:
            cached = pool.start(name, size, hashes[:size])
            if cached is not None:
                sizes[name] = size
                assert set(hashes[:cached]) <= known
        elif kind == "grow" and name in sizes and pool.grow(name, max(size, sizes[name])):
            sizes[name] = max(size, sizes[name])
        elif kind == "cache" and name in sizes:
            pool.cache(name, 0, hashes[: sizes[name]])
        elif kind == "free":
            pool.free(name)
            sizes.pop(name, None)
        pool.check_integrity()
        if (change := pool.take_change()) is not None:
            assert not set(change.stored) & set(change.removed)
            known = known - set(change.removed) | set(change.stored)
    for name in sizes:
        pool.free(name)
    assert pool.num_used_blocks == 0
    assert pool.start("all", 6, sorted(known)[:6]) is not None
