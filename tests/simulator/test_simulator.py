"""The simulator: merging steps into runs changes no result, and workers start, drain and flip."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.coordinator.scaling.autoscale.types import Phase
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import PoolLimits, ScalingConfig, Targets
from baton.coordinator.state.scaling_decision import Drain, Flip, SetSize
from baton.load import stats
from baton.load.traces import Arrival
from baton.runtime.config import SimulatedConfig, parse
from baton.runtime.steps.latency import LatencyModel
from baton.simulator.baselines import Hindsight, Hpa, Planner, needed_sizes
from baton.simulator.cell import ColdStart, SimulatedCell
from baton.simulator.parts import Shape
from baton.simulator.picture import svg
from baton.simulator.policies import Baton, Static, decision
from baton.simulator.record import Moment
from baton.simulator.report import figures
from baton.simulator.run import simulate
from baton.v1 import common_pb2
from tests.coordinator.virtual_cell import VirtualCell, WorkerShape

DATA = Path(__file__).parents[1] / "data"
MODEL = LatencyModel(0.005, 0.0001, 0.0, 0.010, 0.0001, 1e-7)
SHAPE = Shape(
    MODEL,
    kv_tokens=100_000,
    max_num_batched_tokens=512,
    max_model_len=8192,
    follows_step_targets=False,
)
CONFIG = ScalingConfig(prefill=PoolLimits(1, 8), decode=PoolLimits(1, 8), cold_start_s=20.0)


def core_config(**coordinator) -> CoreConfig:
    values = {
        "model": "simulated",
        "coordinator": {"max_running_requests": 10**6, **coordinator},
        "decode": {"local_prefill": False},
        "lanes": {"interactive": {"max_queued": 10**6, "max_queue_s": 3600}},
    }
    return replace(CoreConfig.of(parse(values, "test")), latency=MODEL)


def steady(rate: float, seconds: float, prompt=400, output=100) -> list[Arrival]:
    """Arrivals at a fixed rate; their lengths follow a repeating pattern."""
    return [
        Arrival(n / rate, prompt + 37 * (n % 11), max(1, output + 13 * (n % 7) - 39))
        for n in range(round(rate * seconds))
    ]


def cell(policy=None, shape=SHAPE, **options) -> SimulatedCell:
    return SimulatedCell(
        core_config(), dict.fromkeys(Pool, shape), policy or Static(CONFIG), **options
    )


def sizes(prefill: int, decode: int) -> dict[Pool, int]:
    return {Pool.PREFILL: prefill, Pool.DECODE: decode}


def ttfts(record) -> list[float]:
    return [first - at for first, at in zip(record.firsts, record.arrivals, strict=True)]


def lasted(record) -> list[float]:
    return [end - at for end, at in zip(record.ends, record.arrivals, strict=True)]


def test_runs_of_steps_give_the_same_times_as_single_steps():
    arrivals = steady(12, 30)
    made = cell()
    record = made.run(arrivals, sizes(1, 2), 31)
    made.core.check_integrity()
    shape = WorkerShape(
        MODEL,
        kv_tokens=100_000,
        max_num_seqs=256,
        max_num_batched_tokens=512,
        noise=0.0,
        prefix_caching=False,
    )
    stepped = VirtualCell(core_config())
    stepped.add_worker("p0", common_pb2.ROLE_PREFILL, shape)
    stepped.add_worker("d0", common_pb2.ROLE_DECODE, shape)
    stepped.add_worker("d1", common_pb2.ROLE_DECODE, shape)
    began_at = stepped.now
    for one in arrivals:
        stepped.at(
            began_at + one.at_s,
            lambda one=one: stepped.submit(one.num_prompt_tokens, one.num_output_tokens),
        )
    stepped.run(began_at + 60)
    ends = [one.token_times[-1] - one.arrived_at for one in stepped.outcomes]
    for percent in (10, 50, 90, 99):
        assert stats.percentile(ttfts(record), percent) == pytest.approx(
            stats.percentile([one.ttft_s for one in stepped.outcomes], percent), rel=0.02
        )
        assert stats.percentile(lasted(record), percent) == pytest.approx(
            stats.percentile(ends, percent), rel=0.02
        )
        gaps = [gap for one in stepped.outcomes for gap in one.gaps_s]
        assert made.gaps.percentile(percent) == pytest.approx(
            stats.percentile(gaps, percent), rel=0.04
        )
    assert made.gaps.total == sum(one.num_output_tokens - 1 for one in arrivals)


@pytest.mark.parametrize("flush_s", [0.01, 0.3, 1000.0])
def test_the_flush_interval_changes_no_request_time(flush_s):
    arrivals = steady(10, 20)
    usual = cell().run(arrivals, sizes(1, 1), 21)
    other = cell(shape=replace(SHAPE, flush_s=flush_s)).run(arrivals, sizes(1, 1), 21)
    assert ttfts(other) == pytest.approx(ttfts(usual))
    assert lasted(other) == pytest.approx(lasted(usual), rel=1e-3)


@pytest.mark.parametrize("swaps", [True, False])
def test_requests_that_outgrow_the_kv_cache_all_end(swaps):
    # The workers announce no limit, so only the engine limits the batch.
    tight = replace(SHAPE, kv_tokens=3000, announced_kv_tokens=0, swaps=swaps)
    made = cell(shape=tight)
    record = made.run(steady(10, 10, prompt=200, output=300), sizes(1, 1), 11)
    made.core.check_integrity()
    assert not record.reasons
    assert not any(map(math.isnan, record.ends))
    roomy = cell().run(steady(10, 10, prompt=200, output=300), sizes(1, 1), 11)
    assert stats.median(lasted(record)) > stats.median(lasted(roomy))


class Script(Static):
    """A policy that takes given actions at given seconds since the beginning."""

    def __init__(self, **actions) -> None:
        super().__init__(CONFIG)
        self._actions = {float(name.removeprefix("at_")): one for name, one in actions.items()}
        self._began_at = None
        self.seen = []

    def decide(self, observation, config, now):
        self._began_at = now if self._began_at is None else self._began_at
        self.seen.append(observation)
        actions = self._actions.pop(now - self._began_at, ())
        return decision(dict.fromkeys(Pool, 1), dict.fromkeys(Pool, 1), "script", actions)


def test_a_started_worker_is_paid_from_its_order_and_serves_after_its_cold_start():
    script = Script(at_5=(SetSize(Pool.DECODE, 2),))
    made = cell(script, cold_start=ColdStart(1, 7, 1, 1), gpus={Pool.PREFILL: 1, Pool.DECODE: 4})
    record = made.run(steady(5, 30), sizes(1, 1), 30)
    serving = {one.at_s: one.decode for one in record.moments}
    paid = {one.at_s: one.decode_paid for one in record.moments}
    assert (serving[5], serving[10], serving[20]) == (1, 1, 2)
    assert (paid[0], paid[10], paid[20]) == (1, 2, 2)
    assert record.gpu_hours * 3600 == pytest.approx(30 + 4 * 30 + 4 * 25)
    assert (record.num_cold_starts, record.cold_start_s) == (1, 10)
    starting = script.seen[2].of(Pool.DECODE, Phase.STARTING)
    assert [one.since - 1000 for one in starting] == [5]


def test_a_drained_worker_leaves_after_its_requests_and_none_fails():
    made = cell(Script(at_10=(Drain("decode-1", "test"),)))
    record = made.run(steady(10, 30), sizes(1, 2), 31)
    made.core.check_integrity()
    assert not record.reasons
    assert not any(map(math.isnan, record.ends))
    assert record.moments[-1].decode_paid == 1
    assert made.core.stats.num_recoveries == 0


def test_a_flipped_worker_serves_the_other_pool_and_none_fails():
    made = cell(Script(at_10=(Flip("prefill-1", Pool.DECODE),)))
    record = made.run(steady(10, 30), sizes(2, 1), 31)
    made.core.check_integrity()
    assert not record.reasons
    assert not any(map(math.isnan, record.ends))
    last = record.moments[-1]
    assert (last.prefill, last.decode) == (1, 2)
    assert (last.prefill_paid, last.decode_paid) == (1, 2)
    assert record.num_cold_starts == 0


def test_a_lost_worker_makes_no_more_tokens():
    arrivals = steady(1, 10, output=1000)
    made = cell()
    lost = ev.WorkerLost("decode-1", "was lost")
    made.at(1010.0, lambda: made._post(lost))
    record = made.run(arrivals, sizes(1, 2), 31)
    made.core.check_integrity()
    assert not record.reasons
    assert not any(map(math.isnan, record.ends))
    # Only tokens that were in transit are made twice.
    needed = sum(one.num_output_tokens - 1 for one in arrivals)
    assert made.gaps.total < needed * 1.01


def test_pools_grow_under_load_and_shrink_after_it():
    config = replace(CONFIG, down_window_s=30.0, targets=(("interactive", Targets(0.5, 0.03)),))
    arrivals = [
        *steady(3, 60),
        *(one._replace(at_s=one.at_s + 60) for one in steady(40, 120)),
        *(one._replace(at_s=one.at_s + 180) for one in steady(3, 120)),
    ]
    made = cell(Baton(config), cold_start=ColdStart.lasting(20))
    record = made.run(arrivals, sizes(1, 1), 300)
    assert not record.reasons
    by_time = {one.at_s: one for one in record.moments}
    assert by_time[55].prefill == 1
    assert by_time[175].prefill >= 3
    assert by_time[295].prefill <= 2
    assert by_time[175].ttft_p95_s < 0.5
    assert any("ms with" in one.prefill.reason for _, one in record.decisions)


@pytest.mark.parametrize("name", ["hpa", "planner", "hindsight"])
def test_every_baseline_grows_only_the_overloaded_pool(name):
    arrivals = steady(30, 100)
    policy = {
        "hpa": lambda: Hpa(CONFIG, 2.0, 40.0),
        "planner": lambda: Planner(CONFIG, MODEL, SHAPE.kv_tokens),
        "hindsight": lambda: Hindsight(
            CONFIG, needed_sizes(arrivals, CONFIG, MODEL, SHAPE.kv_tokens), 10.0, 20.0
        ),
    }[name]()
    made = cell(policy, cold_start=ColdStart.lasting(20))
    record = made.run(arrivals, sizes(1, 1), 101)
    assert not record.reasons
    # The planner goes on growing and shrinking the pool.
    largest = max(record.moments, key=lambda one: one.prefill)
    assert largest.prefill > 1
    assert max(one.decode for one in record.moments) < largest.prefill


@pytest.mark.parametrize("policy", ["baton", "hpa", "planner", "hindsight"])
def test_a_long_pause_of_a_trace_needs_no_further_workers(policy):
    """Without an ITL target, nothing limits the requests of a worker while there are none."""
    targets = {"ttft_ms": 500, "itl_ms": None}
    values = {
        "prefill": {"workers": 1},
        "decode": {"workers": 1},
        "scaling": {"targets": {"interactive": targets}},
    }
    arrivals = [Arrival(0.0, 100, 20), Arrival(800.0, 100, 20)]
    found = simulate(parse(values, "the test"), arrivals, policy).figures
    assert found.attained == 1
    assert found.num_cold_starts == 0


def test_figures_are_computed_from_the_record():
    made = cell()
    record = made.run(steady(5, 20), sizes(1, 1), 21)
    found = figures(record, made.gaps, Targets(0.5, 0.05))
    assert found.num_requests == 100
    assert found.attained == found.ttft_within == found.tpot_within == 1
    assert found.gpu_hours == pytest.approx(2 * 21 / 3600)
    assert found.goodput_per_gpu == pytest.approx(100 / 42)
    strict = figures(record, made.gaps, Targets(0.5, 0.001))
    assert strict.tpot_within < 0.1
    assert strict.itl_within == 0


@pytest.mark.parametrize("policy", ["static", "colocated"])
def test_rates_count_the_time_in_which_a_backlog_is_served(policy):
    """As in `baton bench`, with whose results the rates are compared."""
    config = parse({"prefill": {"workers": 1}, "decode": {"workers": 1}}, "the test")
    found = simulate(config, steady(100, 1, prompt=2000), policy)
    ends, began_at = found.record.ends, found.record.began_at
    served_s = max(ends) - began_at
    assert served_s > 3 * found.figures.lasted_s
    assert found.figures.requests_per_s == pytest.approx(len(ends) / served_s)
    num_attained = found.figures.attained * len(ends)
    assert found.figures.goodput_per_s == pytest.approx(num_attained / served_s)


@pytest.mark.parametrize("policy", ["static", "colocated"])
def test_a_request_that_the_kv_cache_cannot_hold_is_refused(policy):
    def simulated(kv_tokens: int, engines=None):
        values = {
            "simulated": {"kv_tokens": kv_tokens},
            "prefill": {"workers": 1},
            "decode": {"workers": 1},
        }
        return simulate(parse(values, "the test"), arrivals, policy, engines)

    arrivals = [Arrival(n / 10, 2000, 101) for n in range(10)]
    assert not simulated(2112).figures.num_failed
    with pytest.raises(ValueError, match=r"^simulated\.kv_tokens: is 2111; must be at least 2112"):
        simulated(2111)
    small = SimulatedConfig(kv_tokens=1000)
    with pytest.raises(ValueError, match=r"kv_tokens of the decode workers: is 1000; must be at"):
        simulated(2112, {Pool.DECODE: small})


def test_a_picture_shows_the_request_rate_between_decisions():
    def moment(at_s, num_arrived):
        return Moment(at_s, 1, 1, 1, 1, num_arrived, math.nan, math.nan)

    moments = [moment(0.0, 1), moment(0.5, 1), moment(5.5, 10), moment(10.5, 10)]
    root = ElementTree.fromstring(svg(moments, Targets(), "title"))
    lines = [one.get("points") for one in root.iter() if one.tag.endswith("polyline")]
    heights = {float(point.split(",")[1]) for point in lines[4].split()}
    assert len(heights) == 1


def test_a_constant_pool_size_is_not_drawn_on_the_border():
    moments = [Moment(at_s, 3, 0, 3, 0, 1, math.nan, math.nan) for at_s in (0.0, 5.0)]
    root = ElementTree.fromstring(svg(moments, Targets(), "title"))
    frame = next(one for one in root.iter() if one.get("stroke") == "#999")
    top = float(frame.get("y"))
    lines = [one.get("points") for one in root.iter() if one.tag.endswith("polyline")]
    for line in lines[:4]:
        for point in line.split():
            assert top < float(point.split(",")[1]) < top + float(frame.get("height"))


# ---- The command.


def test_baton_simulate_prints_a_table_and_writes_files(tmp_path):
    trace, config = tmp_path / "trace.json", tmp_path / "baton.yaml"
    rows = [{"start_time": n / 5, "prompt_len": 300, "output_len": 20} for n in range(100)]
    trace.write_text(json.dumps(rows))
    config.write_text("scaling:\n  targets:\n    interactive: {ttft_ms: 300, itl_ms: 20}\n")
    figures_file, picture = tmp_path / "out.json", tmp_path / "out.svg"
    result = CliRunner().invoke(
        app,
        [
            *("simulate", str(trace), "--config", str(config), "--policy", "hpa"),
            *("--json", str(figures_file), "--picture", str(picture)),
        ],
    )
    assert result.exit_code == 0, result.output
    assert "TTFT, ms" in result.output
    found = json.loads(figures_file.read_text())
    assert found["num_requests"] == 100
    assert found["attained"] == 1
    assert found["decisions"][0]["prefill"]["reason"]
    ElementTree.fromstring(picture.read_text())


def test_baton_simulate_runs_plain_servers_as_many_as_both_pools_have_workers(tmp_path):
    trace, figures_file = tmp_path / "trace.json", tmp_path / "out.json"
    rows = [{"start_time": n / 5, "prompt_len": 300, "output_len": 20} for n in range(100)]
    trace.write_text(json.dumps(rows))
    arguments = ["simulate", str(trace), "--policy", "colocated", "--json", str(figures_file)]
    picture = tmp_path / "out.svg"
    result = CliRunner().invoke(
        app, [*arguments, "--prefill", "1", "--decode", "2", "--picture", str(picture)]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(figures_file.read_text())
    assert found["gpu_hours"] == pytest.approx(3 * found["lasted_s"] / 3600)
    assert found["attained"] == 1
    assert sum(one["num_arrived"] for one in found["moments"]) == 100
    ElementTree.fromstring(picture.read_text())
    result = CliRunner().invoke(app, [*arguments, "--prefill", "0", "--decode", "0"])
    assert result.exit_code == 2
    assert "prefill.workers and decode.workers are 0; one must be at least 1" in result.output


def test_baton_simulate_names_the_limit_that_a_request_exceeds(tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text('[{"start_time": 0, "prompt_len": 9000, "output_len": 2}]')
    result = CliRunner().invoke(app, ["simulate", str(trace)])
    assert result.exit_code == 2
    assert "simulated.max_model_len: is 8192" in result.output


def test_an_output_on_a_prefill_worker_keeps_an_elastic_cell_awake():
    """The pools may shrink to no worker, and the worker that read the prompt decodes."""
    pools, slow = PoolLimits(0, 4), replace(MODEL, step_base_s=0.04)
    scaling = ScalingConfig(
        prefill=pools, decode=pools, idle_s=60.0, down_window_s=60.0, cold_start_s=60.0
    )
    made = SimulatedCell(
        replace(core_config(), elastic=True, latency=slow),
        dict.fromkeys(Pool, replace(SHAPE, model=slow)),
        Baton(scaling),
        cold_start=ColdStart.lasting(60.0),
    )
    record = made.run([Arrival(0.5, 500, 7000)], sizes(1, 1), 2.0)
    # 7,000 steps without a pause.
    alone_s = 7000 * slow.decode_step_s(1, 4000)
    assert lasted(record) == pytest.approx([alone_s], rel=0.05)
