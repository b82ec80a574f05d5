"""The autoscaling benchmark: summaries of runs, goals, options, and a short run end to end."""

from __future__ import annotations

import contextlib
import math
import sys

import pytest

from baton.bench import autoscale, autoscale_scenes, simulated_scale
from baton.bench.autoscale import Runs
from baton.bench.autoscale_scenes import BATON, BATON_AT, HPA, HPA_AT, PLANNER, POLICIES, STATIC
from baton.coordinator.scaling.autoscale.types import DecodeLoad, Observation, Phase, WorkerView
from baton.coordinator.state.pools import Pool
from baton.simulator.cell import SimulatedCell
from baton.simulator.report import Figures


def figures(attained: float, gpu_hours: float) -> Figures:
    nothing: dict[int, float] = {}
    return Figures(
        num_requests=100,
        num_failed=0,
        lasted_s=60.0,
        targets={},
        ttft_ms=nothing,
        ttft_ratio=nothing,
        itl_ms=nothing,
        tpot_ms=nothing,
        e2e_ms=nothing,
        attained=attained,
        ttft_within=attained,
        tpot_within=attained,
        itl_within=attained,
        requests_per_s=1.0,
        goodput_per_s=1.0,
        goodput_per_gpu=1.0,
        gpu_hours=gpu_hours,
        num_cold_starts=0,
        cold_start_s=0.0,
        num_events=0,
    )


def runs(*seeds: tuple[float, float]) -> Runs:
    return Runs([figures(*one) for one in seeds])


def test_a_setting_beats_another_on_both_axes_or_not_at_all():
    one = runs((0.9, 10.0), (0.8, 12.0), (0.95, 11.0))
    assert (one.attained, one.gpu_hours) == (0.9, 11.0)
    assert one.beats(runs((0.89, 11.5)))
    assert not one.beats(runs((0.89, 10.5)))
    assert not one.beats(runs((0.91, 11.5)))


def test_a_baseline_is_compared_with_the_best_setting_of_the_same_cost():
    strict, loose = (one for one in BATON_AT if one != BATON)
    found = {
        strict: runs((0.99, 17.0)),
        BATON: runs((0.98, 16.0)),
        loose: runs((0.95, 15.0)),
        HPA: runs((0.97, 16.5)),
        PLANNER: runs((0.6, 13.0)),
    }
    hpa, planner = autoscale.frontier(found)
    assert hpa.endswith("Baton 98.0% for 16.0")
    assert planner.endswith("every setting of Baton uses more")


def test_hpa_is_compared_by_its_best_setting():
    """Like Baton's settings, those of HPA have other target depths for the prefill pool."""
    usual, deep, deeper = HPA_AT
    found = {
        STATIC: runs((0.99, 25.0)),
        BATON: runs((0.97, 16.0)),
        usual: runs((0.8, 18.0)),
        deep: runs((0.96, 17.0)),
        deeper: runs((0.98, 26.0)),
        PLANNER: runs((0.6, 13.0)),
    }
    # The usual setting attains less than another one for more GPU-hours.
    assert [one.partition(":")[0] for one in autoscale.frontier(found)] == [deep, deeper, PLANNER]
    assert autoscale.best_hpa(found) == deep
    by_name = {one.what: one for one in autoscale.goals({("code", 60.0): found})}
    assert by_name[f"code, 60 s: attained - {deep}'s"].seen == pytest.approx(0.01)
    # No setting attains 95 %.
    assert autoscale.best_hpa({**found, deep: runs((0.9, 17.0)), deeper: runs((0.94, 26.0))}) == (
        deeper
    )
    assert autoscale.best_hpa({STATIC: found[STATIC]}) is None


def test_the_settings_of_hpa_have_different_depths():
    scene = autoscale_scenes.scene("azure", 0, 0.1, 20.0)
    sizes = []
    for name in HPA_AT:
        policy = scene.policy(name, 60.0, None)
        workers = tuple(
            WorkerView(f"{pool.value}-{index}", pool, Phase.SERVING, 0.0)
            for pool in Pool
            for index in range(2)
        )
        load = DecodeLoad(num_in_prefill=4, num_decodes=10)
        seen = Observation(0.0, workers, scene.latency, decode=load)
        sizes.append(policy.decide(seen, policy.config, 0.0).prefill.target)
    # Four prompts on two workers: depth 2, twice that of the second setting.
    assert sizes == [2, 4, 6]


def test_a_table_names_its_number_of_seeds(capsys):
    autoscale.show("azure", 60.0, {STATIC: runs((0.99, 20.0))})
    assert "azure, cold start 60 s: one seed" in capsys.readouterr().out
    autoscale.show("azure", 60.0, {STATIC: runs((0.99, 20.0), (0.98, 21.0))})
    assert "azure, cold start 60 s: medians of 2 seeds" in capsys.readouterr().out


def test_reaches_are_told_by_setting():
    found = {
        STATIC: runs((0.99, 20.0)),
        BATON: runs((0.985, 14.0)),
        HPA: runs((0.97, 16.5)),
        PLANNER: runs((0.6, 13.0)),
    }
    by_name = {one.what: one for one in autoscale.goals({("azure", 60.0): found})}
    assert by_name["azure, 60 s: attained / static's"].reached
    assert by_name["azure, 60 s: GPU-hours / static's"].reached
    assert by_name["azure, 60 s: settings better than HPA on both"].reached
    assert not by_name["azure, 60 s: settings better than planner on both"].reached


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--traces", "nile"], "--traces: nile; must be among azure"),
        (["--policies", "none"], "--policies: none"),
        (["--seeds", "0"], "--seeds: is 0"),
        (["--factor", "nan"], "--factor: is nan"),
    ],
)
def test_wrong_options_are_refused_in_words(arguments, said, capsys):
    with pytest.raises(SystemExit):
        autoscale.parsed(arguments)
    assert said in capsys.readouterr().err


def test_the_simulated_workers_plan_their_steps_as_batons_workers_do(monkeypatch):
    """By default Baton's scheduler limits the steps by the targets (`steps.scheduler`)."""
    follow = []

    class Seen(SimulatedCell):
        def __init__(self, config, shapes, *arguments, **options):
            follow.append({one.follows_step_targets for one in shapes.values()})
            super().__init__(config, shapes, *arguments, **options)

    for module in (autoscale_scenes, simulated_scale):
        monkeypatch.setattr(module, "SimulatedCell", Seen)
    made = autoscale_scenes.scene("azure", 0, 0.1, 20.0)
    made.cell(made.policy(BATON, 10.0, None), 10.0)
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr(sys, "argv", ["simulated_scale", "--requests", "20", "--minutes", "0.2"])
    # The goals are for the whole hour.
    with contextlib.suppress(SystemExit):
        simulated_scale.main()
    assert follow == [{True}, {True}]


def test_it_runs_from_end_to_end(capsys):
    arguments = autoscale.parsed(
        [
            *("--traces", "azure", "--cold-starts", "10", "--seeds", "2"),
            *("--processes", "1", "--factor", "0.1"),
        ]
    )
    arguments.at_most_s = 20.0
    results, details = autoscale.run(arguments)
    found = results["azure", 10.0]
    assert tuple(found) == POLICIES
    for one in found.values():
        assert len(one.by_seed) == 2
        assert 0 < one.attained <= 1
        assert math.isfinite(one.gpu_hours)
    # Different seeds give different loads.
    assert len({one.num_requests for one in found[STATIC].by_seed}) == 2
    assert "medians of 2 seeds" in capsys.readouterr().out
    assert details["azure, needs"]["prefill"]
