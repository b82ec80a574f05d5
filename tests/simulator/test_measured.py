"""A live cell's own load, compared with other ways to serve it."""

import json

import pytest
import typer

from baton.cli import doctor
from baton.coordinator.state.pools import Pool
from baton.runtime.ttft_target import TtftTarget
from baton.simulator import comparison
from baton.simulator.measured import NotMeasured, measured
from baton.v1 import admin_pb2
from tests.coordinator.live_status import LiveCell


def described(cell: LiveCell):
    return cell.status(), cell.list_workers(), cell.list_requests()


TARGETS = {"ttft_ms": 300, "ttft_ms_per_1k_tokens": 40, "itl_ms": 14}


@pytest.fixture(scope="module")
def wrong_split() -> LiveCell:
    """Three prefill workers and one decode worker under a load of outputs."""
    cell = LiveCell(
        scaling={"targets": {"interactive": TARGETS}},
        decode={"local_prefill": True},
    )
    cell.workers(3, 1, max_num_batched_tokens=2048, kv_tokens=200_000)
    return cell.load(30, 50, 100, 20).after(60)


def test_a_wrong_split_is_compared_with_an_elastic_cell_and_colocated_serving(wrong_split):
    cell = measured(*described(wrong_split))
    assert len(cell.arrivals) == len(wrong_split.outcomes)
    assert {one.num_prompt_tokens for one in cell.arrivals} == {50}
    assert cell.targets.ttft == TtftTarget(0.3, 0.04)
    rows = [row for _, row in comparison.run(cell.config, cell.arrivals, cell.setups(), 1)]
    attained = {row.setup.name: row.figures.attained for row in rows}
    present = attained.pop("3 prefill + 1 decode")
    assert attained["elastic"] > present + 0.2
    # The simulation repeats what happened.
    itls_s = [sum(one.gaps_s) / len(one.gaps_s) for one in wrong_split.outcomes]
    real = sum(one <= 0.014 for one in itls_s) / len(itls_s)
    assert present == pytest.approx(real, abs=0.05)
    # Colocated serving attains as much: every worker may do everything.
    assert attained["colocated, 2048/step"] == pytest.approx(attained["elastic"], abs=0.01)
    text = cell.conclusion(rows)
    assert text.startswith("Best for this load: elastic, with ")
    assert "points more than the present cell (3 prefill + 1 decode, " in text


def test_a_cell_without_measurements_says_what_is_missing(wrong_split):
    status, workers, requests = described(wrong_split)
    with pytest.raises(NotMeasured, match="3 requests have ended; a comparison needs 50"):
        measured(status, workers, requests[:3])
    with pytest.raises(NotMeasured, match="workers that serve: 1; "):
        measured(status, workers[:1], requests)
    fresh = LiveCell().workers().after(1)
    with pytest.raises(NotMeasured, match="0 steps are measured"):
        measured(*described(fresh))


def test_each_pool_is_simulated_with_its_own_settings():
    """As with different engine_args for the pools: the decode worker runs 8 requests at a time."""
    cell = LiveCell(scaling={"targets": {"interactive": TARGETS}}, decode={"local_prefill": True})
    cell.workers(2, 0, max_num_batched_tokens=4096, max_num_seqs=64, kv_tokens=200_000)
    cell.workers(0, 1, max_num_batched_tokens=1024, max_num_seqs=8, kv_tokens=50_000)
    cell.load(10, 50, 100, 20).after(60)
    found = measured(*described(cell))
    limits = {pool: (one.max_num_seqs, one.kv_tokens) for pool, one in found.engines.items()}
    assert limits == {Pool.PREFILL: (64, 200_000), Pool.DECODE: (8, 50_000)}
    setups = found.setups()
    assert [one.step_tokens for one in setups] == [1024, 2048, 4096, None, None]
    split = [one for one in setups if one.is_split]
    ((_, present),) = comparison.run(found.config, found.arrivals, split, 1, found.engines)
    assert present.setup.name == "2 prefill + 1 decode"
    # With the settings of a prefill worker, no request would wait for the decode worker.
    real = sum(one.ttft_s <= 0.3 for one in cell.outcomes) / len(cell.outcomes)
    assert real < 0.8
    assert present.figures.ttft_within == pytest.approx(real, abs=0.1)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({}, ("baton", None)),
        ({"scheduler": "vllm"}, ("vllm", None)),
        ({"longest_gap_ms": 30}, ("baton", 30)),
    ],
)
def test_steps_are_simulated_as_in_the_cell(wrong_split, steps, expected):
    _, workers, requests = described(wrong_split)
    status = LiveCell(scaling={"targets": {"interactive": TARGETS}}, steps=steps).workers().status()
    found = measured(status, workers, requests).config.steps
    assert (found.scheduler, found.longest_gap_ms) == expected


def test_workers_of_a_pool_that_differ_are_not_compared(wrong_split):
    status, workers, requests = described(wrong_split)
    p1 = next(one for one in workers if one.worker_id == "p1")
    p1.capacity.kv_tokens = 1000
    assert measured(status, workers, requests).engines[Pool.PREFILL].kv_tokens == 1000
    p1.capacity.max_num_seqs = 7
    with pytest.raises(NotMeasured, match=r"the prefill workers have different max_num_seqs \(7, "):
        measured(status, workers, requests)
    p1.CopyFrom(wrong_split.list_workers()[0])
    for one in workers:
        one.model.max_model_len = 149
    with pytest.raises(NotMeasured, match=r"had 150 tokens, .* max_model_len is 149 now"):
        measured(status, workers, requests)


def test_doctor_compares_and_reports_in_text_and_json(monkeypatch, capsys, wrong_split):
    found = described(wrong_split)
    monkeypatch.setattr(doctor, "call_admin", lambda address, question: found)
    doctor.doctor(compare=True, as_json=False)
    out = capsys.readouterr().out
    assert "3 prefill + 1 decode" in out
    assert out.splitlines()[-1].startswith("Best for this load: ")
    doctor.doctor(compare=True, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["conclusion"] == out.splitlines()[-1]
    instant = [admin_pb2.WorkerInfo.FromString(one.SerializeToString()) for one in found[1]]
    for one in instant:
        one.latency.step_base_ms = one.latency.step_per_request_ms = 0
    for workers, requests, problem in (
        (found[1], [], "0 requests have ended"),
        (instant, found[2], "no comparison: simulated: a decode step takes no time"),
    ):
        told = found[0], workers, requests
        monkeypatch.setattr(doctor, "call_admin", lambda *_, told=told: told)
        with pytest.raises(typer.Exit) as ended:
            doctor.doctor(compare=True)
        assert ended.value.exit_code == 1
        assert problem in capsys.readouterr().err
