"""Summaries of the mixed load: requests without an answer count."""

from __future__ import annotations

import json
import math

import pytest

from baton.bench import mixed_load, why
from baton.bench.mixed_load import LONG, SHORT, Answer, Arrival, Slo
from baton.bench.streams import Timed
from baton.load import stats


def answer(number: int, ttft_s: float | None, kind=SHORT) -> Answer:
    arrival = Arrival(number / 10, kind, [5])
    if ttft_s is None:
        return Answer(arrival, None)
    tokens = range(kind.output_tokens)
    return Answer(arrival, Timed(list(tokens), [ttft_s + 0.03 * token for token in tokens]))


def test_a_refused_request_is_an_infinite_ttft():
    answers = [answer(n, 0.5 if n < 80 else None) for n in range(100)]
    found = mixed_load.summary(answers, Slo())
    assert found["ttft_p50_ms"] == pytest.approx(500)
    assert found["ttft_p90_ms"] == found["short_ttft_p99_ms"] == math.inf
    assert found["shed_share"] == found["short_shed_share"] == pytest.approx(0.2)
    assert math.isnan(found["long_shed_share"])


def test_refusals_of_late_requests_reach_no_goal_of_ttft():
    """Both systems make the same requests wait equally long, and one refuses the late ones."""
    waits = [0.05 + 1.95 * n / 299 for n in range(300)]
    kinds = [LONG if n % 4 == 0 else SHORT for n in range(300)]
    plain = [answer(n, wait, kinds[n]) for n, wait in enumerate(waits)]
    refusing = [answer(n, wait if wait <= 1.0 else None, kinds[n]) for n, wait in enumerate(waits)]
    load = why.Load("busy", 10.0, [{why.ROBIN: plain, why.BATON: refusing}])
    ratios = load.ratios()
    assert set(ratios).isdisjoint(why.SHARES)
    assert ratios["goodput_per_s"] == pytest.approx(1.0)
    assert ratios["ttft_p90_ms"] == ratios["ttft_p99_ms"] == math.inf
    reached = {one.what: one.reached for one in why.goals(why.Results([load]))}
    assert [one for name, one in reached.items() if "TTFT p9" in name] == [False, False]


def test_the_tables_have_the_share_without_an_answer(capsys):
    answers = [answer(n, 0.5 if n < 60 else None, LONG if n % 2 else SHORT) for n in range(100)]
    why.show_load(why.Load("busy", 10.0, [dict.fromkeys((why.ROBIN, why.BATON), answers)]))
    shown = capsys.readouterr().out
    assert shown.count("no answer") == 2
    assert shown.count("40.0 %") == 6


def test_percentiles_and_ratios_of_infinite_values():
    assert stats.percentile([1.0, math.inf, math.inf], 75) == math.inf
    assert stats.percentile([1.0, 2.0, math.inf], 50) == 2.0
    assert stats.ratio(math.inf, math.inf) == stats.ratio(0.0, 0.0) == 1.0
    assert stats.ratio(math.inf, 2.0) == stats.ratio(1.0, 0.0) == math.inf


def test_saved_figures_are_json_without_infinite_values(tmp_path):
    stats.save({"runs": [{"ttft": math.inf, "share": math.nan, "met": 0.5}]}, tmp_path / "made")
    made = json.loads((tmp_path / "made").read_text(), parse_constant=pytest.fail)
    assert made == {"runs": [{"ttft": None, "share": None, "met": 0.5}]}
