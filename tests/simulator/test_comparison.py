"""`baton simulate --compare`: its rows, its conclusion, its processes and its output."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from baton.cli.main import app
from baton.coordinator.state.scaling_config import Targets
from baton.load import traces
from baton.runtime.config import parse
from baton.runtime.config_error import ConfigError
from baton.simulator import comparison, processes
from baton.simulator.comparison import Row, Setup
from baton.simulator.report import Figures
from baton.simulator.run import simulate

PERCENTS = (50, 90, 95, 99)


def config(prefill: int, decode: int, **simulated):
    pools = {"prefill": {"workers": prefill}, "decode": {"workers": decode}}
    return parse({"model": "simulated", **pools, "simulated": simulated}, "test")


def write_trace(path):
    rows = [{"start_time": n / 20, "prompt_len": 600, "output_len": 30} for n in range(100)]
    path.write_text(json.dumps(rows))
    return path


# ---- Rows.


def test_rows_are_colocated_serving_all_splits_elastic_and_the_autoscalers():
    found = comparison.setups(config(1, 3))
    assert [(one.name, one.policy, one.prefill, one.decode) for one in found] == [
        ("colocated, 2048/step", "colocated", 1, 3),
        ("1 prefill + 3 decode", "static", 1, 3),
        ("2 prefill + 2 decode", "static", 2, 2),
        ("3 prefill + 1 decode", "static", 3, 1),
        ("elastic", "static", 1, 3),
        ("Baton, autoscaled", "baton", 1, 3),
        ("elastic, autoscaled", "baton", 1, 3),
        ("HPA, autoscaled", "hpa", 1, 3),
    ]
    assert [one.ratio for one in found if one.is_split] == ["1:3", "1:1", "3:1"]
    applied = [one.applied(config(1, 3)).elastic for one in found]
    elastic = [one.name for one, is_elastic in zip(found, applied, strict=True) if is_elastic]
    assert elastic == ["elastic", "elastic, autoscaled"]


def test_colocated_serving_is_also_compared_with_the_configured_step_size():
    found = comparison.setups(config(1, 1, max_num_batched_tokens=512))
    assert [one.step_tokens for one in found if one.policy == "colocated"] == [512, 2048]
    assert found[0].applied(config(1, 1)).simulated.max_num_batched_tokens == 512


@pytest.mark.parametrize("num_workers", [9, 10, 33, 200])
def test_many_workers_have_a_selection_of_splits_with_both_ends_and_the_configured_one(
    num_workers,
):
    found = comparison.splits(num_workers, own=5)
    assert found == sorted(set(found))
    assert {1, 5, num_workers - 1} <= set(found)
    assert 7 <= len(found) <= 8
    steps = [after - before for before, after in itertools.pairwise(found)]
    assert max(steps) <= math.ceil((num_workers - 2) / 6)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 0), (0, 1), (0, 0)])
def test_fewer_than_two_workers_cannot_be_split(prefill, decode):
    with pytest.raises(ValueError, match=f"prefill.workers is {prefill} .* at least 2 together"):
        comparison.setups(config(prefill, decode))


def test_two_workers_of_one_pool_can_be_split():
    assert [one.prefill for one in comparison.setups(config(2, 0))[1:]] == [1] * 5
    assert [one.prefill for one in comparison.setups(config(0, 2))[1:]] == [1] * 5


def test_each_row_equals_the_single_simulation(tmp_path):
    arrivals = traces.read(write_trace(tmp_path / "trace.json"))
    chosen = comparison.setups(config(1, 1))
    found = dict(comparison.run(config(1, 1), arrivals, chosen, 2))
    assert [found[index].setup for index in range(len(chosen))] == chosen
    for index, one in enumerate(chosen):
        alone = simulate(one.applied(config(1, 1)), arrivals, one.policy)
        assert found[index].figures == alone.figures


# ---- The conclusion.


def row(
    name: str,
    attained: float,
    gpu_hours: float = 1.0,
    *,
    policy: str = "static",
    ttft_ms: float = 100.0,
    sizes: tuple[int, int] = (1, 1),
) -> Row:
    times = dict.fromkeys(PERCENTS, 20.0)
    figures = Figures(
        num_requests=100,
        num_failed=0,
        lasted_s=60.0,
        targets={},
        ttft_ms=dict.fromkeys(PERCENTS, ttft_ms),
        ttft_ratio=dict.fromkeys(PERCENTS, ttft_ms / 500),
        itl_ms=times,
        tpot_ms=times,
        e2e_ms=times,
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
    return Row(Setup(name, policy, *sizes, 2048 if policy == "colocated" else None), figures)


PLAIN = row("colocated, 2048/step", 0.9, policy="colocated")


def best_of(*rows: Row) -> str:
    return comparison.concluded([PLAIN, *rows], Targets()).best.setup.name


def test_the_best_row_is_the_cheapest_that_attains_the_percentile():
    assert best_of(row("a", 0.96), row("b", 0.99), row("c", 0.94, 0.5)) == "b"
    assert best_of(row("a", 0.96), row("b", 0.955, 0.9, policy="baton")) == "b"


def test_without_a_row_that_attains_the_percentile_the_best_attains_most():
    found = comparison.concluded([PLAIN, row("a", 0.94, 2.0), row("b", 0.5, 0.1)], Targets())
    assert found.best.setup.name == "a"
    assert found.rule == "most attained; no row attains 95 %"


def test_of_rows_that_attain_equally_much_the_fastest_is_best():
    slow, fast = row("slow", 1.0, ttft_ms=400), row("fast", 1.0, ttft_ms=300)
    assert best_of(slow, fast, row("never", 1.0, ttft_ms=math.nan)) == "fast"


def test_the_conclusion_names_the_best_split_and_its_distance_to_the_best_colocated_row():
    worse = row("colocated, 512/step", 0.3, policy="colocated")
    split = row("2 prefill + 6 decode", 0.875, ttft_ms=80, sizes=(2, 6))
    all_splits = [replace(PLAIN, setup=replace(split.setup, prefill=n)) for n in range(6)]
    scaled = row("Baton, autoscaled", 1.0, policy="baton")
    some = comparison.concluded([worse, PLAIN, split, scaled], Targets()).text
    assert some == (
        "Best split of this trace among 1 of 7 splits: 2 prefill + 6 decode (1:3). It attains "
        "87.5 %, 2.5 points less than colocated serving with 2048 tokens per step (90.0 %); TTFT "
        "p99 is 80 ms instead of 100 ms, mean ITL p99 20.0 ms instead of 20.0 ms."
    )
    worst = [replace(one, figures=worse.figures) for one in all_splits]
    assert "of this trace: 2" in comparison.concluded([PLAIN, split, *worst], Targets()).text
    better = row("1 prefill + 1 decode", 0.95)
    assert "5.0 points more than" in comparison.concluded([PLAIN, better], Targets()).text
    elastic = row("elastic", 0.99)
    elastic = replace(elastic, setup=replace(elastic.setup, elastic=True))
    autoscaled = replace(elastic, setup=replace(elastic.setup, policy="baton"))
    found = comparison.concluded([PLAIN, better, elastic, autoscaled], Targets())
    assert found.text.endswith(" An elastic cell, without a split, attains 99.0 %.")
    assert found.best is elastic
    equal = row("1 prefill + 1 decode", 0.9)
    assert "as much as" in comparison.concluded([PLAIN, equal], Targets()).text


def test_the_table_marks_the_best_row_and_shows_missing_latencies():
    rows = [PLAIN, row("a", 0.96, ttft_ms=math.nan)]
    cells = comparison.table(rows, rows[1])
    assert [one[-1] for one in cells] == ["", "best"]
    assert cells[1][:5] == ["a", "96.0%", "-", "-", "-"]
    assert all(len(one) == len(comparison.COLUMNS) for one in cells)


# ---- Processes.


def test_every_value_gets_its_result():
    found = dict(processes.results(math.factorial, [5, 3, 1, 4], 2))
    assert found == {0: 120, 1: 6, 2: 1, 3: 24}
    assert not multiprocessing.active_children()


def test_an_error_of_the_function_reaches_the_caller_and_ends_the_processes():
    with pytest.raises(ValueError, match="negative"):
        dict(processes.results(math.factorial, [5, -1], 2))
    assert not multiprocessing.active_children()


def test_processes_end_when_the_caller_stops():
    running = processes.results(time.sleep, [0, 3600, 3600], 2)
    assert next(running) == (0, None)
    running.close()
    assert not multiprocessing.active_children()


def test_a_killed_process_is_an_error():
    with pytest.raises(BrokenProcessPool):
        dict(processes.results(os._exit, [9], 1))
    assert not multiprocessing.active_children()


# ---- The command.


def test_compare_prints_one_row_per_setup_and_writes_the_same_rows(tmp_path):
    trace, out = write_trace(tmp_path / "trace.json"), tmp_path / "out.json"
    arguments = ["simulate", str(trace), "--compare", "--workers", "2", "--json", str(out)]
    arguments += ["--ttft-ms", "900", "--ttft-ms-per-1k-tokens", "70", "--itl-ms", "40"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    names = [one.name for one in comparison.setups(config(1, 1))]
    assert [one["name"] for one in found["rows"]] == names
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1 : len(names) + 1]] == names
    (best,) = (one for one in found["rows"] if one["best"])
    assert best["name"] == found["best"]
    assert [line.endswith("best") for line in lines].index(True) == names.index(best["name"]) + 1
    assert found["rows"][0]["ttft_ms"]["99"] > 0
    assert lines[-1] == found["conclusion"]
    targets = {"ttft_ms": 900, "ttft_ms_per_1k_tokens": 70, "itl_ms": 40}
    assert all(one["targets"] == targets for one in found["rows"])
    assert "TTFT within 900 ms + 70 ms per 1,000 prompt tokens and mean ITL" in result.stdout


@pytest.mark.parametrize(
    ("value", "allowed"),
    [("-1", "must be greater than or equal to 0"), (str(2**31), "must be less than or equal to")],
)
def test_a_wrong_target_names_the_key(tmp_path, value, allowed):
    trace = write_trace(tmp_path / "trace.json")
    result = CliRunner().invoke(app, ["simulate", str(trace), "--ttft-ms-per-1k-tokens", value])
    assert result.exit_code != 0
    key = "scaling.targets.interactive.ttft_ms_per_1k_tokens"
    assert f"{key}: is {value}; {allowed}" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "hpa"], "--policy: cannot be used with --compare"),
        (["--picture", "x.svg"], "--picture: cannot be used with --compare"),
        (["--workers", "4", "--decode", "2"], "cannot be used with --prefill or --decode"),
        (["--workers", "1"], "greater than or equal to 2"),
        (["--prefill", "1", "--decode", "0"], "decode.workers is 0; must be at least 2 together"),
    ],
)
def test_compare_names_the_option_that_is_wrong(tmp_path, arguments, message):
    trace = write_trace(tmp_path / "trace.json")
    result = CliRunner().invoke(app, ["simulate", str(trace), "--compare", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    missing = CliRunner().invoke(app, ["simulate", str(tmp_path / "none.json"), "--compare"])
    assert missing.exit_code == 2
    assert "cannot be read" in missing.output


@pytest.mark.parametrize("policy", ["baton", "hpa", "planner", "hindsight", None])
def test_pools_that_are_sized_begin_within_their_limits(tmp_path, policy):
    """As with `baton up`: otherwise the first decision would end workers without a word."""
    trace = write_trace(tmp_path / "trace.json")
    how = ["--policy", policy] if policy else ["--compare"]
    because = f"the policy {policy} sizes the pools" if policy else "--compare also simulates"
    for sizes, pool in (("17 1", "prefill"), ("1 17", "decode")):
        prefill, decode = sizes.split()
        arguments = ["simulate", str(trace), *how, "--prefill", prefill, "--decode", decode]
        result = CliRunner().invoke(app, arguments)
        assert isinstance(result.exception, ConfigError)
        assert str(result.exception).startswith(
            f"{pool}.workers: is 17; must be at most 16, scaling.{pool}.max_workers, because "
            f"{because}"
        )


def test_pools_of_a_fixed_size_may_be_larger_than_the_limits_of_sized_ones(tmp_path):
    trace = write_trace(tmp_path / "trace.json")
    arguments = ["--policy", "static", "--prefill", "17", "--decode", "1"]
    result = CliRunner().invoke(app, ["simulate", str(trace), *arguments])
    assert result.exit_code == 0, result.output


def test_a_request_that_is_too_long_ends_the_comparison_with_one_line(tmp_path):
    trace = tmp_path / "trace.json"
    trace.write_text('[{"start_time": 0, "prompt_len": 9000, "output_len": 2}]')
    result = CliRunner().invoke(app, ["simulate", str(trace), "--compare"])
    assert result.exit_code == 2
    assert "simulated.max_model_len: is 8192" in result.output
