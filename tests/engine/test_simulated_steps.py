"""Step targets in the simulated engine, under a clock that only its latency model moves."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from baton.engine import simulated
from baton.engine.base import EngineRequest, StepSample
from baton.engine.sim_tokens import Vocabulary, expected_tokens
from baton.engine.simulated import SimulatedEngine
from baton.runtime import demo_model
from baton.runtime.config import SimulatedConfig
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import common_pb2

SETTINGS = SimulatedConfig(
    prefill_base_ms=5.0,
    prefill_per_token_ms=0.1,
    step_base_ms=8.0,
    step_per_request_ms=0.1,
    max_model_len=8192,
    kv_tokens=65536,
    mean_output_tokens=0,
)
# Share of the longest gap that a step may take, and of a step that the oldest prompt gets
# (runtime/steps/step_budget.py).
GAP_MARGIN, OLDEST_SHARE = 0.9, 0.1
TARGETS = StepTargets(itl_s=0.03, longest_gap_s=0.036, prompt_step_s=0.1)


@dataclass
class Bench:
    """An engine under a virtual clock, with the tokens and times of what it has put out."""

    engine: SimulatedEngine
    now: float = 0.0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    first_at: dict[str, float] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    samples: list[StepSample] = field(default_factory=list)

    async def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 1,
        lane: int = 0,
        itl_s: float | None = None,
        due_in_s: float = math.inf,
    ) -> None:
        sampling = common_pb2.SamplingParams(max_tokens=max_tokens)
        self.tokens[name] = []
        request = EngineRequest(
            name, prompt, sampling, priority=lane, itl_s=itl_s, due_in_s=due_in_s
        )
        await self.engine.submit(request)

    async def step(self) -> None:
        for output in (await self.engine.next_step()).outputs:
            self.tokens[output.engine_request_id] += output.token_ids
            self.first_at.setdefault(output.engine_request_id, self.now)
            if output.finish is not None:
                self.ended_at[output.engine_request_id] = self.now
        self.samples += self.engine.take_load().samples

    async def until(self, *names: str) -> None:
        while not self.ended_at.keys() >= set(names):
            await self.step()


NewBench = Callable[..., Awaitable[Bench]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return demo_model.ensure("demo", weights=False, root=tmp_path_factory.mktemp("model"))


@pytest.fixture
async def new_bench(model: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NewBench]:
    benches: list[Bench] = []

    async def make(targets: StepTargets | None = TARGETS, **changes: object) -> Bench:
        settings = SETTINGS.model_copy(update=changes)
        bench = Bench(SimulatedEngine(model, "m", settings, ""))
        benches.append(bench)

        async def sleep_until(at: float) -> None:
            bench.now = max(bench.now, at)
            await asyncio.sleep(0)

        monkeypatch.setattr(simulated, "monotonic", lambda: bench.now)
        monkeypatch.setattr(simulated, "_sleep_until", sleep_until)
        await bench.engine.start()
        if targets is not None:
            bench.engine.set_step_targets(targets)
        return bench

    yield make
    for bench in benches:
        await bench.engine.stop()
        bench.engine.check_integrity()


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(200) for _ in range(length)]


async def test_short_prompts_overtake_a_long_one_that_runs(new_bench: NewBench) -> None:
    bench = await new_bench()
    await bench.submit("long", prompt(6000))
    await bench.step()
    await bench.submit("short", prompt(50, 2))
    submitted_at = bench.now
    await bench.until("long", "short")
    # The step that was running at the submission, the one after it and the one with the prompt.
    assert bench.ended_at["short"] - submitted_at <= 3 * TARGETS.prompt_step_s
    assert bench.ended_at["long"] - submitted_at > 4 * TARGETS.prompt_step_s


@pytest.mark.parametrize("changes", [{"targets": None}, {"time_scale": 0.0}])
async def test_without_a_limit_prompts_come_in_the_order_of_their_arrival(
    new_bench: NewBench, changes: dict[str, object]
) -> None:
    bench = await new_bench(**changes)
    await bench.submit("long", prompt(6000))
    await bench.submit("short", prompt(50, 2))
    await bench.until("long", "short")
    assert [sample.num_prefill_tokens for sample in bench.samples] == [2048, 2048, 1954]


async def test_a_scheduler_of_vllm_ignores_the_targets(model: str) -> None:
    engine = SimulatedEngine(model, "m", SETTINGS, "", follows_step_targets=False)
    engine.set_step_targets(TARGETS)
    await engine.start()
    bench = Bench(engine)
    await bench.submit("long", prompt(4000))
    await bench.until("long")
    assert [sample.num_prefill_tokens for sample in bench.samples] == [2048, 1952]
    await engine.stop()


@pytest.mark.parametrize("time_scale", [1.0, 0.5])
async def test_steps_beside_a_stream_keep_its_itl_target(
    new_bench: NewBench, time_scale: float
) -> None:
    bench = await new_bench(time_scale=time_scale)
    await bench.submit("stream", prompt(20), max_tokens=200)
    while not bench.tokens["stream"]:
        await bench.step()
    for number in range(3):
        await bench.submit(f"long{number}", prompt(3000, number))
    await bench.until("stream", "long0", "long1", "long2")
    mixed = [one for one in bench.samples if one.num_decodes and one.num_prefill_tokens]
    assert len(mixed) > 10
    assert max(one.duration_s for one in mixed) <= GAP_MARGIN * TARGETS.longest_gap_s + 1e-9
    elapsed_s = bench.ended_at["stream"] - bench.first_at["stream"]
    assert elapsed_s / 199 <= TARGETS.itl_s


async def test_a_stream_keeps_the_itl_target_that_its_request_named(new_bench: NewBench) -> None:
    """The engine's target is 30 ms; the stream beside it has no other."""
    mean_s = {}
    for itl_s in (None, 0.02):
        bench = await new_bench()
        await bench.submit("stream", prompt(20), max_tokens=200, itl_s=itl_s)
        await bench.submit("other", prompt(20, 5), max_tokens=200)
        while not (bench.tokens["stream"] and bench.tokens["other"]):
            await bench.step()
        for number in range(20):
            await bench.submit(f"long{number}", prompt(3000, number))
        await bench.until("stream", "other")
        mean_s[itl_s] = (bench.ended_at["stream"] - bench.first_at["stream"]) / 199
    assert mean_s[0.02] <= 0.02 < mean_s[None] <= TARGETS.itl_s


async def test_a_batch_stream_has_no_itl_target(new_bench: NewBench) -> None:
    bench = await new_bench()
    await bench.submit("stream", prompt(20), max_tokens=60, lane=1)
    while not bench.tokens["stream"]:
        await bench.step()
    await bench.submit("long", prompt(3000))
    await bench.until("stream", "long")
    longest_s = max(one.duration_s for one in bench.samples)
    assert TARGETS.longest_gap_s < longest_s <= TARGETS.prompt_step_s + 1e-9


async def test_without_an_itl_target_streams_do_not_limit_steps(new_bench: NewBench) -> None:
    bench = await new_bench(StepTargets(prompt_step_s=0.1))
    await bench.submit("stream", prompt(20), max_tokens=60)
    await bench.submit("long", prompt(3000))
    await bench.until("stream", "long")
    assert max(one.duration_s for one in bench.samples) > 0.09


async def test_interactive_prompts_come_before_batch_prompts(new_bench: NewBench) -> None:
    bench = await new_bench()
    await bench.submit("batch", prompt(500), lane=1)
    await bench.submit("batch long", prompt(4000), lane=1)
    await bench.submit("interactive", prompt(2000), lane=0)
    await bench.until("batch", "batch long", "interactive")
    assert bench.ended_at["interactive"] < bench.ended_at["batch long"]


async def test_the_oldest_prompt_progresses_however_many_short_ones_arrive(
    new_bench: NewBench,
) -> None:
    """Short prompts alone would fill every step."""
    bench = await new_bench()
    await bench.submit("long", prompt(6000))
    await bench.step()
    alone_s = 6000 * SETTINGS.prefill_per_token_ms / 1e3
    number = 0
    while "long" not in bench.ended_at:
        for _ in range(10):
            number += 1
            await bench.submit(f"short{number}", prompt(100, number))
        await bench.step()
        assert bench.now < 1.2 * alone_s / OLDEST_SHARE
    assert len(bench.ended_at) > 50


async def test_a_waiting_long_prompt_does_not_starve(new_bench: NewBench) -> None:
    """Every place is taken, and shorter prompts arrive faster than they are computed."""
    bench = await new_bench(max_num_seqs=2)
    for number in range(4):
        await bench.submit(f"first{number}", prompt(900, number))
    await bench.submit("long", prompt(3000))
    number = 0
    while "long" not in bench.ended_at:
        number += 1
        await bench.submit(f"short{number}", prompt(1100, number))
        await bench.step()
        assert bench.now < 30.0
    # Shorter prompts that arrived much later were overtaken by the long one.
    assert len(bench.ended_at) < number


async def test_a_preempted_stream_is_not_late(new_bench: NewBench) -> None:
    """Its first token was in time; prompts that can be in time keep coming."""
    bench = await new_bench()
    await bench.submit("stream", prompt(500), max_tokens=2000, due_in_s=0.5)
    while bench.now < 5.0:
        await bench.step()
    assert bench.first_at["stream"] < 0.5
    # The engine makes steps before their outputs are taken.
    assert bench.engine.preempt("stream")
    num_before, number = len(bench.tokens["stream"]), 0
    for _ in range(20):
        for _ in range(8):
            number += 1
            await bench.submit(f"in time {number}", prompt(1000, number), due_in_s=600.0)
        await bench.step()
    assert len(bench.tokens["stream"]) > num_before + 5


async def test_cached_prompts_count_only_their_other_tokens(new_bench: NewBench) -> None:
    bench = await new_bench()
    shared = prompt(4000)
    await bench.submit("first", shared)
    await bench.until("first")
    await bench.submit("medium", prompt(2500, 2))
    await bench.submit("cached", [*shared, 7, 8, 9])
    await bench.until("medium", "cached")
    assert bench.ended_at["cached"] < bench.ended_at["medium"]


@pytest.mark.parametrize("seed", range(3))
async def test_tokens_are_the_same_with_targets(new_bench: NewBench, model: str, seed: int) -> None:
    """Few blocks, so requests are preempted; both lanes; all arrive at random times."""
    bench, rng = await new_bench(kv_tokens=8192, max_num_seqs=16), random.Random(seed)
    vocabulary, prompts = Vocabulary.load(model), dict[str, tuple[list[int], int]]()
    for number in range(60):
        name, length = f"r{number}", rng.choice([1, 2, 17, 100, 700, 3000])
        prompts[name] = prompt(length, rng.randrange(20)), rng.randint(1, 60)
        await bench.submit(name, *prompts[name], lane=rng.randint(0, 1))
        for _ in range(rng.randint(0, 3)):
            await bench.step()
            bench.engine.check_integrity()
        if rng.random() < 0.1:
            bench.engine.preempt(rng.choice(list(prompts)))
    await bench.until(*prompts)
    for name, (tokens, count) in prompts.items():
        assert bench.tokens[name] == expected_tokens(vocabulary, tokens, count)
