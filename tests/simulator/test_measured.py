"""A live cell's own load, compared with other ways to serve it."""

import json
import sys
from pathlib import Path

import pytest
import typer

from baton.cli import admin_calls, doctor
from baton.runtime.ttft_target import TtftTarget
from baton.simulator import comparison
from baton.simulator.measured import NotMeasured, measured

sys.path.append(str(Path(__file__).parents[1] / "coordinator"))

from live_status import LiveCell


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
    with pytest.raises(NotMeasured, match="1 workers serve"):
        measured(status, workers[:1], requests)
    fresh = LiveCell().workers().after(1)
    with pytest.raises(NotMeasured, match="0 steps are measured"):
        measured(*described(fresh))


def test_doctor_compares_and_reports_in_text_and_json(monkeypatch, capsys, wrong_split):
    found = described(wrong_split)
    monkeypatch.setattr(admin_calls, "call_admin", lambda address, question: found)
    doctor.doctor(compare=True, as_json=False)
    out = capsys.readouterr().out
    assert "3 prefill + 1 decode" in out
    assert out.splitlines()[-1].startswith("Best for this load: ")
    doctor.doctor(compare=True, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["conclusion"] == out.splitlines()[-1]
    monkeypatch.setattr(admin_calls, "call_admin", lambda *_: (found[0], found[1], []))
    with pytest.raises(typer.Exit) as ended:
        doctor.doctor(compare=True)
    assert ended.value.exit_code == 1
    assert "0 requests have ended" in capsys.readouterr().err
