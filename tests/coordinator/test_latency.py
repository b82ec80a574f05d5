"""Latency models of worker kinds, from load reports to the Admin service."""

from __future__ import annotations

import asyncio
import random

import pytest

from baton.coordinator.routing.loads.latency import LatencyRegistry, WorkerKind
from baton.coordinator.routing.loads.worker_traits import traits_of
from baton.coordinator.state import events as ev
from baton.coordinator.state.fleets import Fleets
from baton.coordinator.state.workers import Worker
from baton.engine import simulated
from baton.engine.base import EngineRequest
from baton.runtime import demo_model
from baton.runtime.config import LatencyConfig, SimulatedConfig, parse
from baton.runtime.config_error import ConfigError
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import admin_pb2, admin_pb2_grpc, cluster_pb2, common_pb2

PREFILL, DECODE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE
SEED = LatencyModel.from_config(LatencyConfig())
TRUE = LatencyModel(0.02, 3e-4, 0.0, 0.025, 1e-3, 1e-6)


def decode(batch: int, factor: float = 1.0) -> cluster_pb2.StepSample:
    kv = 300 * batch
    return cluster_pb2.StepSample(
        num_decodes=batch,
        num_kv_tokens=kv,
        duration_us=round(TRUE.decode_step_s(batch, kv) * factor * 1e6),
    )


def decodes(count: int, seed: int = 1) -> list[cluster_pb2.StepSample]:
    rng = random.Random(seed)
    return [decode(rng.randint(1, 32), rng.gauss(1, 0.03)) for _ in range(count)]


def report(world, worker_id: str, steps, incarnation: int = 1) -> None:
    load = cluster_pb2.LoadReport(steps=steps)
    world.handle(ev.LoadReported((worker_id, incarnation), load))


def described(world, worker_id: str):
    return world.core.latency.describe(WorkerKind.of(world.core.workers.by_id(worker_id).hello))


def worker(say_hello, name: str, **changes) -> Worker:
    hello = say_hello(name, DECODE, **changes)
    return Worker(hello, Fleets("1").stable, hello.role, hello.state, attached_at=0.0, heard_at=0.0)


def test_load_reports_fit_the_model_of_the_workers_kind(world):
    assert described(world, "d").model == SEED
    for seed in range(20):
        report(world, "d", decodes(100, seed))
    found = described(world, "d")
    assert found.model.decode_step_s(8, 2400) == pytest.approx(
        TRUE.decode_step_s(8, 2400), rel=0.03
    )
    assert found.quality.num_samples > 500
    assert found.quality.error_p50 < 0.05
    # The prefill worker has the same kind, so it has the same model.
    assert described(world, "p").model == found.model


def test_an_unmeasured_kind_has_the_seed_model(world):
    for seed in range(5):
        report(world, "d", decodes(100, seed))
    world.attach("gpu", DECODE, device="cuda")
    assert described(world, "gpu").model == SEED
    assert described(world, "d").model != SEED


def test_workers_on_other_gpus_have_another_model(world):
    """vLLM calls the type of every NVIDIA GPU "cuda"."""
    world.attach("h100", DECODE, device="cuda", device_name="H100")
    world.attach("other", DECODE, device="cuda", device_name="H20")
    for seed in range(5):
        report(world, "h100", decodes(100, seed))
    assert described(world, "h100").model != SEED
    assert described(world, "other").model == SEED


def piled_up(factor: float, seed: int) -> list[cluster_pb2.StepSample]:
    """Steps of a worker `factor` times as slow: its outputs pile up."""
    rng = random.Random(seed)
    return [decode(rng.randint(1, 16) * round(factor), factor) for _ in range(100)]


def slowdowns(world, names) -> list[float]:
    """How many times as long as its kind's each worker's steps are predicted."""
    kind = described(world, names[0]).model
    found = []
    for name in names:
        traits = traits_of(world.core.workers.by_id(name).hello, world.core.latency)
        found.append(traits.latency.decode_step_s(8, 2400) / kind.decode_step_s(8, 2400))
    return found


def test_a_slow_worker_has_its_own_speed_and_does_not_spoil_the_fit_of_its_kind(world):
    names = ["slow", "d", "e", "f"]
    for name in ("slow", "e", "f"):
        world.attach(name, DECODE)
    for seed in range(20):
        for name in names:
            report(world, name, piled_up(2.0 if name == "slow" else 1.0, seed))
    model = described(world, "d").model
    assert model.decode_step_s(8, 2400) == pytest.approx(TRUE.decode_step_s(8, 2400), rel=0.05)
    assert slowdowns(world, names) == pytest.approx([2.0, 1.0, 1.0, 1.0], rel=0.05)
    # It is as fast as the others again.
    for seed in range(20):
        for name in names:
            report(world, name, piled_up(1.0, seed))
    assert slowdowns(world, names) == [1.0] * 4


def test_of_two_workers_the_slow_one_has_its_own_speed(world):
    world.attach("slow", DECODE)
    for seed in range(20):
        report(world, "slow", piled_up(1.6, seed))
        report(world, "d", piled_up(1.0, seed))
    assert slowdowns(world, ["slow", "d"]) == pytest.approx([1.6, 1.0], rel=0.05)


def test_a_worker_that_alone_decodes_has_the_speed_of_its_kind(world):
    """Its factor and the kind's costs of decodes could not be told apart."""
    prompts = [
        cluster_pb2.StepSample(
            num_prefill_tokens=size,
            prefill_token_squares=size**2,
            duration_us=round(TRUE.prefill_s(size) * 1e6),
        )
        for size in range(100, 2000, 19)
    ]
    names = ["p", "p2", "p3"]
    for name in names[1:]:
        world.attach(name, PREFILL)
    for number in range(80):
        for name in names:
            report(world, name, prompts)
        report(world, "d", piled_up(1.6 if number < 10 else 1.0, number))
    assert slowdowns(world, ["d", *names]) == [1.0] * 4
    found = described(world, "d").model.decode_step_s(8, 2400)
    assert found == pytest.approx(TRUE.decode_step_s(8, 2400), rel=0.1)


def test_a_slow_worker_does_not_speak_for_its_kind(world):
    for name in ("slow", "e", "f"):
        world.attach(name, DECODE)
    for seed in range(20):
        for name in ("slow", "e", "f"):
            report(world, name, piled_up(3.0 if name == "slow" else 1.0, seed))
    view = world.core.placers.of(world.core.workers.by_id("slow").fleet).view
    ((latency, _),) = view.loads.kinds
    assert latency.decode_step_s(8, 2400) == pytest.approx(TRUE.decode_step_s(8, 2400), rel=0.05)


def test_a_worker_alone_is_as_fast_as_its_kind(world):
    for factor in (1.0, 3.0):
        for seed in range(20):
            report(world, "d", piled_up(factor, seed))
        assert slowdowns(world, ["d"]) == [1.0]


def test_a_new_workers_first_steps_of_each_size_do_not_count(world):
    """Each worker compiles kernels at its first steps of each size."""
    for seed in range(10):
        report(world, "d", decodes(100, seed))
    before = described(world, "d")
    world.attach("d2", DECODE)
    for batch in (1, 2, 4, 8, 16):
        report(world, "d2", [decode(batch, 50.0) for _ in range(3)])
    after = described(world, "d")
    assert after.model == before.model
    assert after.quality == before.quality
    assert after.num_cold == before.num_cold + 15
    report(world, "d2", [decode(1)])
    assert described(world, "d").quality.num_samples == before.quality.num_samples + 1


def test_a_restarted_worker_is_cold_again(world):
    for _ in range(2):
        report(world, "d", [decode(1)] * 3)
    assert described(world, "d").quality.num_samples == 3
    world.attach("d", DECODE, incarnation=2)
    report(world, "d", [decode(1)] * 3, incarnation=2)
    # This late report comes from the previous incarnation.
    report(world, "d", [decode(1)] * 3)
    found = described(world, "d")
    assert (found.quality.num_samples, found.num_cold) == (3, 6)


def test_many_workers_share_the_work_of_a_round(say_hello):
    registry = LatencyRegistry(SEED)
    workers = [worker(say_hello, f"w{number}") for number in range(200)]
    kind = WorkerKind.of(workers[0].hello)

    def taken() -> int:
        found = registry.describe(kind)
        return found.quality.num_samples + found.quality.num_rejected + found.num_cold

    steps = decodes(100)
    for one in workers:
        registry.observe(one, steps)
    before = taken()
    for one in workers:
        registry.observe(one, steps)
    assert taken() - before == 200
    for one in workers[1:]:
        registry.forget(one.key)
    before = taken()
    registry.observe(workers[0], steps)
    assert taken() - before == 50
    # Over several reports, each position of a report is sampled.
    names = set()
    for _ in range(3):
        registry.observe(workers[0], [decode(1), *[decode(64)] * 127])
        names.add(taken())
    assert len(names) == 3


def test_kinds_are_bounded_and_the_latest_are_kept(say_hello):
    registry = LatencyRegistry(SEED, max_kinds=3)
    workers = [worker(say_hello, f"w{n}", engine_version=str(n)) for n in range(5)]
    for one in workers:
        for _ in range(10):
            registry.observe(one, decodes(20))
    assert len(registry) == 3
    models = [registry.model(WorkerKind.of(one.hello)) for one in workers]
    assert [model == SEED for model in models] == [True, True, False, False, False]
    # A kind that was dropped starts again without measurements.
    for _ in range(10):
        registry.observe(workers[0], decodes(20))
    assert registry.model(WorkerKind.of(workers[0].hello)) != SEED
    registry.forget(workers[1].key)


def test_tensor_parallel_workers_are_a_kind_of_their_own(say_hello):
    alone = say_hello("a", DECODE)
    pair = say_hello("b", PREFILL)
    assert WorkerKind.of(alone) == WorkerKind.of(pair)
    pair.fingerprint.tp_size = 2
    assert WorkerKind.of(alone) != WorkerKind.of(pair)


def test_the_seed_is_configured(new_world):
    config = parse({"latency": {"step_base_ms": 40.0, "prefill_per_token_ms": 1.0}}, "test")
    world = new_world(latency=LatencyModel.from_config(config.latency)).pair()
    model = described(world, "d").model
    assert (model.step_base_s, model.prefill_per_token_s) == (0.04, 0.001)
    assert model.prefill_base_s == SEED.prefill_base_s
    with pytest.raises(ConfigError, match=r"latency.step_base_ms: is -1"):
        parse({"latency": {"step_base_ms": -1}}, "test")
    with pytest.raises(ConfigError, match=r"latency.step_base_ms: is nan"):
        parse({"latency": {"step_base_ms": float("nan")}}, "test")


async def test_operators_see_the_fit_of_each_worker(coordinator, channel, say_hello):
    post = coordinator.shell.core.handle
    post(ev.WorkerAttached(say_hello("d", DECODE)), 0.0)
    admin = admin_pb2_grpc.AdminStub(channel)

    async def latency() -> admin_pb2.LatencyInfo:
        answer = await admin.ListWorkers(admin_pb2.ListWorkersRequest())
        return answer.workers[0].latency

    seeded = await latency()
    assert seeded.step_base_ms == pytest.approx(SEED.step_base_s * 1e3)
    assert (seeded.num_samples, seeded.HasField("error_p50")) == (0, False)
    for seed in range(20):
        load = cluster_pb2.LoadReport(steps=decodes(100, seed))
        post(ev.LoadReported(("d", 1), load), 0.0)
    fitted = await latency()
    step_ms = (
        fitted.step_base_ms + 8 * fitted.step_per_request_ms + 2400 * fitted.step_per_kv_token_ms
    )
    assert step_ms == pytest.approx(TRUE.decode_step_s(8, 2400) * 1e3, rel=0.03)
    assert fitted.num_samples > 500
    assert fitted.num_cold > 0
    assert 0 < fitted.error_p50 < fitted.error_p90 < 0.1
    assert 0 < fitted.decode_errors.p50 < fitted.decode_errors.p90 < 0.1
    # No worker has reported a step with prompt chunks.
    assert not fitted.HasField("mixed_errors")
    assert fitted.mixed_base_ms == pytest.approx(fitted.step_base_ms)


async def test_the_simulated_engines_own_model_comes_back(world, monkeypatch, tmp_path):
    """The engine's steps mix prompt chunks and decodes; only its model advances the clock."""
    now = 0.0

    async def sleep_until(at: float) -> None:
        nonlocal now
        now = max(now, at)
        await asyncio.sleep(0)

    monkeypatch.setattr(simulated, "monotonic", lambda: now)
    monkeypatch.setattr(simulated, "_sleep_until", sleep_until)
    settings = SimulatedConfig(
        prefill_base_ms=6.0,
        prefill_per_token_ms=0.08,
        prefill_per_token_squared_ms=2e-5,
        step_base_ms=11.0,
        step_per_request_ms=0.5,
        step_per_kv_token_ms=1e-3,
        max_num_batched_tokens=512,
    )
    model = demo_model.ensure("demo", weights=False, root=tmp_path)
    engine = simulated.SimulatedEngine(model, "demo", settings, "")
    await engine.start()
    rng = random.Random(1)
    for wave in range(12):
        names = {f"{wave}.{number}" for number in range(rng.randint(1, 24))}
        for name in names:
            prompt = [rng.randrange(200) for _ in range(rng.choice([20, 100, 400, 1500, 4000]))]
            sampling = common_pb2.SamplingParams(max_tokens=rng.randint(1, 40))
            await engine.submit(EngineRequest(name, prompt, sampling))
        while names:
            step = await engine.next_step()
            names -= {output.engine_request_id for output in step.outputs if output.finish}
            report(
                world,
                "d",
                [
                    cluster_pb2.StepSample(
                        num_prefill_tokens=sample.num_prefill_tokens,
                        num_decodes=sample.num_decodes,
                        num_kv_tokens=sample.num_kv_tokens,
                        duration_us=round(sample.duration_s * 1e6),
                        prefill_token_squares=sample.prefill_token_squares,
                    )
                    for sample in engine.take_load().samples
                ],
            )
    await engine.stop()
    found, true = described(world, "d"), LatencyModel.from_config(settings)
    assert found.quality.num_samples > 200
    assert found.quality.error_p90 < 0.02
    assert found.quality.decode_errors.p90 < 0.02
    assert found.quality.mixed_errors.p90 < 0.02
    # Only a few dozen steps are of this kind, so the first predictions count in its percentile.
    assert found.quality.prefill_errors.p50 < 0.02
    for num_tokens in (100, 1000, 4000):
        assert found.model.prefill_s(num_tokens) == pytest.approx(
            true.prefill_s(num_tokens), rel=0.05
        )
    for batch in (1, 8, 24):
        assert found.model.decode_step_s(batch, 1000 * batch) == pytest.approx(
            true.decode_step_s(batch, 1000 * batch), rel=0.05
        )
