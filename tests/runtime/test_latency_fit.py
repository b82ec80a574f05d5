"""The fit finds the model that made the steps, and stays sound when the steps cannot tell."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import astuple, fields, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.runtime.steps.latency import LatencyModel, PrefillChunk
from baton.runtime.steps.latency_fit import LatencyFit
from baton.v1 import cluster_pb2

PRIOR = LatencyModel(0.010, 1e-4, 2e-9, 0.015, 5e-5, 2e-7)
MODELS = {
    "like the prior": LatencyModel(0.008, 1.3e-4, 3e-9, 0.020, 8e-5, 3e-7),
    "a CPU": LatencyModel(0.012, 3.0e-4, 4e-8, 0.022, 2e-3, 1e-6),
    "a large GPU": LatencyModel(0.004, 1.2e-5, 1.5e-10, 0.006, 2e-5, 2e-8),
    "without squares and KV": LatencyModel(0.005, 5e-5, 0.0, 0.008, 2e-4, 0.0),
}
CHUNK = 2048


def sample(
    model: LatencyModel, chunks: list[PrefillChunk], batch: int, kv: int, factor: float = 1.0
) -> cluster_pb2.StepSample:
    """A worker's report of a step that took `factor` times the model's time."""
    return cluster_pb2.StepSample(
        num_prefill_tokens=sum(chunk.num_tokens for chunk in chunks),
        num_decodes=batch,
        num_kv_tokens=kv,
        duration_us=round(model.step_s(chunks, batch, kv) * factor * 1e6),
        prefill_token_squares=sum(chunk.token_squares for chunk in chunks),
    )


def shapes(
    rng: random.Random, kinds: str, lengths: tuple[int, int] = (64, 8000)
) -> Iterator[tuple[list[PrefillChunk], int, int]]:
    """A busy worker's steps: prompt chunks of log-uniform length (p), decodes (d), both (m)."""
    while True:
        kind, chunks, batch, kv = rng.choice(kinds), list[PrefillChunk](), 0, 0
        if kind in "pm":
            length = round(math.exp(rng.uniform(*map(math.log, lengths))))
            done = rng.randrange(0, length, CHUNK)
            chunks.append(PrefillChunk(done, min(CHUNK, length - done)))
        if kind in "dm":
            batch = rng.randint(1, 64)
            kv = sum(rng.randint(50, 2000) for _ in range(batch))
        yield chunks, batch, kv


def feed(fit: LatencyFit, model: LatencyModel, count: int, **changes) -> None:
    """Feeds steps with log-normal noise; a share of them (`outliers`) is 20 times too slow."""
    rng = random.Random(changes.get("seed", 1))
    noise, outliers = changes.get("noise", 0.05), changes.get("outliers", 0.01)
    steps = shapes(rng, changes.get("kinds", "pddddm"), changes.get("lengths", (64, 8000)))
    for _ in range(count):
        factor = math.exp(rng.gauss(0, noise)) * (20 if rng.random() < outliers else 1)
        fit.observe(sample(model, *next(steps), factor))


def worst_error(
    fit: LatencyFit, model: LatencyModel, kinds: str = "pd", lengths=(64, 8000)
) -> float:
    """Largest relative error of the predictions over the seen range."""
    steps = itertools.islice(shapes(random.Random(99), kinds, lengths), 300)
    pairs = [(fit.model.step_s(*step), model.step_s(*step)) for step in steps]
    return max(abs(predicted - true) / true for predicted, true in pairs)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("noise", "bound"), [(0.0, 0.03), (0.1, 0.05)])
def test_steps_with_noise_and_outliers_give_their_model_back(model, noise, bound):
    fit = LatencyFit(PRIOR)
    feed(fit, model, 3000, noise=noise)
    assert worst_error(fit, model) < bound
    quality = fit.quality
    assert quality.num_samples + quality.num_rejected == 3000
    # One step in a hundred was 20 times too slow.
    assert 15 <= quality.num_rejected <= 50


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("mixed_base", [1.0, 3.0])
def test_each_kind_of_step_is_predicted_with_one_base(model, mixed_base):
    """A mixed step pays the larger base once, or a base that is larger than both."""
    model = replace(model, mixed_base_s=model.mixed_base_s * mixed_base)
    fit = LatencyFit(PRIOR)
    feed(fit, model, 3000)
    for kind in "pdm":
        assert worst_error(fit, model, kind) < 0.05
    assert fit.model.mixed_base_s == pytest.approx(model.mixed_base_s, rel=0.15)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_tiny_errors_of_one_sign_are_no_change_of_the_worker(model):
    """Steps without noise leave only the fit's own errors, which have one sign for a while."""
    model = replace(model, mixed_base_s=3 * model.mixed_base_s)
    fit = LatencyFit(PRIOR)
    feed(fit, model, 3000, noise=0.0, outliers=0.0, kinds="dddmmmp")
    assert fit.quality.error_p90 < 0.01
    assert worst_error(fit, model, "pdm") < 0.03


@pytest.mark.parametrize(("kinds", "seen"), [("p", (0,)), ("d", (3,)), ("pd", (0, 3))])
def test_an_unmeasured_mixed_base_is_the_larger_measured_base(kinds, seen):
    for model in MODELS.values():
        fit = LatencyFit(PRIOR)
        feed(fit, model, 1000, kinds=kinds)
        found = astuple(fit.model)
        proportion = PRIOR.mixed_base_s / max(astuple(PRIOR)[base] for base in seen)
        assert fit.model.mixed_base_s == pytest.approx(
            proportion * max(found[base] for base in seen)
        )


def test_unmeasured_bases_follow_the_mixed_base():
    model = LatencyModel(*(value * 4 for value in astuple(PRIOR)))
    fit = LatencyFit(PRIOR)
    feed(fit, model, 2000, kinds="m")
    found = fit.model
    assert found.mixed_base_s == pytest.approx(model.mixed_base_s, rel=0.2)
    speed = found.mixed_base_s / PRIOR.mixed_base_s
    assert found.prefill_base_s == pytest.approx(PRIOR.prefill_base_s * speed)
    assert found.step_base_s == pytest.approx(PRIOR.step_base_s * speed)


def test_chunks_of_one_size_do_not_mix_up_the_bases():
    """Every step is full, so only the tie of the mixed base separates the bases."""
    model = LatencyModel(0.006, 8e-5, 2e-8, 0.011, 5e-4, 1e-6)
    fit, rng = LatencyFit(PRIOR), random.Random(1)
    for _ in range(1500):
        batch = rng.choice([0, 0, *range(1, 24)])
        chunk = PrefillChunk(rng.randrange(8) * 512, 512 - batch)
        chunks = [chunk] if rng.random() < 0.5 or not batch else []
        fit.observe(sample(model, chunks, batch, batch * 800, math.exp(rng.gauss(0, 0.02))))
    assert fit.model.prefill_s(100) == pytest.approx(model.prefill_s(100), rel=0.1)
    assert worst_error(fit, model, "dm") < 0.05


def test_a_few_dozen_steps_are_enough_to_leave_a_wrong_prior():
    for model in MODELS.values():
        fit = LatencyFit(PRIOR)
        feed(fit, model, 60, outliers=0.0)
        assert worst_error(fit, model) < 0.25


def test_mixed_steps_alone_separate_prefill_and_decode():
    model = MODELS["a CPU"]
    fit = LatencyFit(PRIOR)
    feed(fit, model, 2000, kinds="m")
    assert worst_error(fit, model, "m") < 0.05
    assert worst_error(fit, model, "pd") < 0.15


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_tiny_prompts_does_not_spoil_long_ones(seed):
    """On a busy machine, each step may take several times as long as it should."""
    fit, model, rng = LatencyFit(PRIOR), MODELS["a CPU"], random.Random(seed)
    for _ in range(200):
        chunk = PrefillChunk(0, rng.choice([1, 1, 2, 3, 4, 6, 8]))
        fit.observe(sample(model, [chunk], 0, 0, rng.lognormvariate(0, 1)))
    long = [PrefillChunk(0, 2000)]
    assert fit.model.step_s(long, 0, 0) < 10 * model.step_s(long, 0, 0)


def test_one_step_in_ten_may_be_slow():
    model = MODELS["a CPU"]
    fit = LatencyFit(PRIOR)
    feed(fit, model, 3000, outliers=0.1)
    assert worst_error(fit, model) < 0.05


def test_heavy_tails_do_not_distort_the_fit():
    """The excess time is Pareto distributed without a variance; the fit stays near the median."""
    model, rng = MODELS["a CPU"], random.Random(1)
    fit = LatencyFit(PRIOR)
    steps = shapes(rng, "pddddm")
    for _ in range(3000):
        fit.observe(sample(model, *next(steps), 1 + 0.05 * rng.paretovariate(1.1)))
    assert worst_error(fit, model) < 0.25


@pytest.mark.parametrize("factor", [0.2, 0.5, 2.0, 20.0])
def test_the_fit_follows_a_change_of_speed(factor):
    model = MODELS["a CPU"]
    changed = LatencyModel(*(value * factor for value in astuple(model)))
    fit = LatencyFit(PRIOR)
    feed(fit, model, 3000)
    feed(fit, changed, 1000, seed=2)
    assert worst_error(fit, changed) < 0.1


def test_the_fit_follows_a_slow_drift():
    model, fit = MODELS["a CPU"], LatencyFit(PRIOR)
    for number in range(40):
        changed = LatencyModel(*(value * (1 + number / 40) for value in astuple(model)))
        feed(fit, changed, 250, seed=number)
    assert worst_error(fit, changed) < 0.1


def test_a_flood_of_decode_steps_keeps_the_fit_of_prompts():
    model, fit = MODELS["a CPU"], LatencyFit(PRIOR)
    feed(fit, model, 500, kinds="p")
    feed(fit, model, 10_000, kinds="d")
    assert worst_error(fit, model, "p") < 0.03


def test_a_decode_step_takes_time_even_if_all_of_it_seems_to_be_the_tokens():
    """A slow worker's longer outputs pile up, so that its steps hold more tokens."""
    fit, rng = LatencyFit(PRIOR), random.Random(1)
    model = LatencyModel(0.03, 1e-4, 1e-9, 0.028, 1e-4, 3e-8)
    for _ in range(2000):
        batch = rng.randint(4, 8)
        fit.observe(sample(model, [], batch, 8000 * batch))
        fit.observe(sample(model, [], batch, 80_000 * batch, factor=12))
    assert fit.model.decode_step_s(1, 0) > 0


def test_terms_that_were_never_measured_keep_the_priors_proportions():
    """Only decode steps are seen, on a machine 4 times slower than the prior."""
    model = LatencyModel(*(value * 4 for value in astuple(PRIOR)))
    fit = LatencyFit(PRIOR)
    feed(fit, model, 1000, kinds="d")
    assert fit.model.prefill_s(2000) == pytest.approx(model.prefill_s(2000), rel=0.1)


finite = st.floats(0.1, 10.0)


@settings(max_examples=40, deadline=None)
@given(
    factors=st.tuples(*[finite] * len(astuple(PRIOR))),
    length=st.integers(1, 8000),
    batch=st.integers(0, 64),
    context=st.integers(1, 4000),
    seed=st.integers(0, 1000),
)
def test_steps_of_one_shape_are_predicted_and_split_as_in_the_prior(
    factors, length, batch, context, seed
):
    """These steps cannot separate the coefficients: the sum is right, the parts are plausible."""
    pairs = zip(factors, astuple(PRIOR), strict=True)
    model, rng = LatencyModel(*(one * two for one, two in pairs)), random.Random(seed)
    shape = [PrefillChunk(0, length)], batch, batch * context
    fit = LatencyFit(PRIOR)
    for _ in range(300):
        fit.observe(sample(model, *shape, math.exp(rng.gauss(0, 0.03))))
    assert fit.model.step_s(*shape) == pytest.approx(model.step_s(*shape), rel=0.03)
    speed = model.step_s(*shape) / PRIOR.step_s(*shape)
    for found, prior in zip(astuple(fit.model), astuple(PRIOR), strict=True):
        assert speed / 3 <= found / prior <= speed * 3


steps_of_any_kind = st.builds(
    cluster_pb2.StepSample,
    num_prefill_tokens=st.integers(0, 2**32 - 1),
    num_decodes=st.integers(0, 2**32 - 1),
    num_kv_tokens=st.integers(0, 2**64 - 1),
    duration_us=st.integers(0, 2**32 - 1),
    prefill_token_squares=st.integers(0, 2**64 - 1),
)
priors = st.builds(
    LatencyModel, **{one.name: st.sampled_from([0.0, 1e-9, 1e-3, 10.0]) for one in fields(PRIOR)}
)


def step(num_prefill, squares, num_decodes, num_kv, duration_us):
    return cluster_pb2.StepSample(
        num_prefill_tokens=num_prefill,
        prefill_token_squares=squares,
        num_decodes=num_decodes,
        num_kv_tokens=num_kv,
        duration_us=duration_us,
    )


@settings(max_examples=150, deadline=None)
@given(prior=priors, steps=st.lists(steps_of_any_kind, max_size=60))
# The square of a ratio of these times is larger than any float.
@example(
    prior=LatencyModel(0.0, 0.0, 0.0, 1e-9, 0.0, 1e-3, 10.0),
    steps=[
        *[step(0, 0, 0, 0, 0)] * 3,
        step(1024, 1585, 1, 0, 1),
        step(1024, 1024, 1, 4584, 318),
        step(0, 0, 1, 15, 44),
        step(1024, 1024, 1, 34274, 1),
        step(1485, 1489, 1, 0, 133915),
        step(3, 11, 0, 0, 1),
        step(1, 1, 0, 0, 1),
    ],
)
def test_no_steps_make_a_coefficient_negative_or_infinite(prior, steps):
    fit = LatencyFit(prior)
    for step in steps:
        fit.observe(step)
        assert all(math.isfinite(value) and value >= 0 for value in astuple(fit.model))
    quality = fit.quality
    assert quality.num_samples + quality.num_rejected == len(steps)
    if quality.error_p50 is not None:
        assert 0 <= quality.error_p50 <= quality.error_p90 < math.inf


def test_before_any_measurement_the_prior_is_used():
    fit = LatencyFit(PRIOR)
    assert fit.model == PRIOR
    assert fit.quality.error_p50 is None
    for nothing in (
        cluster_pb2.StepSample(duration_us=5),
        cluster_pb2.StepSample(num_decodes=3, num_kv_tokens=9),
        # Impossible: fewer squares than tokens.
        cluster_pb2.StepSample(num_prefill_tokens=9, duration_us=5, prefill_token_squares=8),
    ):
        fit.observe(nothing)
    assert fit.model == PRIOR
    assert fit.quality.num_rejected == 3


def test_the_quality_shows_the_recent_prediction_errors():
    fit = LatencyFit(PRIOR)
    feed(fit, MODELS["a CPU"], 2000, noise=0.1, outliers=0.0)
    quality = fit.quality
    # The median and the 90th percentile of |N(0, 0.1)| are 0.067 and 0.164.
    assert 0.05 < quality.error_p50 < 0.09
    assert 0.12 < quality.error_p90 < 0.22
    for errors in (quality.prefill_errors, quality.decode_errors, quality.mixed_errors):
        assert 0.05 < errors.p50 < 0.09
        assert 0.12 < errors.p90 < 0.22


def test_the_errors_of_a_kind_are_those_of_its_own_steps():
    """Each mixed step takes 1.5 times or half its time, the other steps have little noise."""
    model, fit, rng = MODELS["a CPU"], LatencyFit(PRIOR), random.Random(1)
    for chunks, batch, kv in itertools.islice(shapes(rng, "pdm"), 3000):
        factor = rng.choice([0.5, 1.5]) if chunks and batch else rng.lognormvariate(0, 0.02)
        fit.observe(sample(model, chunks, batch, kv, factor))
    quality = fit.quality
    assert quality.prefill_errors.p90 < 0.15
    assert quality.decode_errors.p90 < 0.15
    assert quality.mixed_errors.p50 > 0.3


def test_a_kind_without_steps_has_no_errors():
    fit = LatencyFit(PRIOR)
    feed(fit, MODELS["a CPU"], 50, kinds="d")
    assert fit.quality.decode_errors == fit.quality.errors
    assert fit.quality.prefill_errors is None
    assert fit.quality.mixed_errors is None
