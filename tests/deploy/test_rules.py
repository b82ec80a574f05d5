"""Each alert fires for the series that must fire it, and for no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.deploy.promql import Data, Labels, Series, Unsupported, evaluate
from tests.deploy.rule_tests import Alert, Rule, seconds, series

DEPLOY = Path(__file__).parents[2] / "deploy"
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
TESTS = yaml.safe_load((DEPLOY / "prometheus" / "rules_test.yaml").read_text())
ALERTS = {rule["alert"]: Rule(rule) for group in RULES["groups"] for rule in group["rules"]}
CASES = [
    pytest.param(test, case, id=f"{case['alertname']}-{case['eval_time']}-{test['name']}")
    for test in TESTS["tests"]
    for case in test["alert_rule_test"]
]


@pytest.mark.parametrize(("test", "case"), CASES)
def test_expected_alerts_fire(test, case):
    interval_s = seconds(test["interval"])
    data = Data([series(one["series"], one["values"], interval_s) for one in test["input_series"]])
    expected = {
        Alert(Labels(one["exp_labels"].items()), Labels(one["exp_annotations"].items()))
        for one in case["exp_alerts"]
    }
    step_s = seconds(TESTS["evaluation_interval"])
    fired = ALERTS[case["alertname"]].firing(data, seconds(case["eval_time"]), step_s)
    assert fired == expected


def test_every_alert_has_a_firing_and_a_silent_case():
    fires = {
        case["alertname"]
        for test in TESTS["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fires == ALERTS.keys()
    silent = {
        case["alertname"]
        for test in TESTS["tests"]
        for case in test["alert_rule_test"]
        if not case["exp_alerts"]
    }
    assert silent == ALERTS.keys()


ONE = [Series(Labels({"__name__": "a", "x": "1"}.items()), [0.0, 15.0, 30.0], [0.0, 5.0, 1.0])]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("sum(a)", 1.0),
        ('a{x="2"}', None),
        ('sum(a{x=~"1|2"})', 1.0),
        # The counter rises by 5, resets, and rises by 1.
        ("sum(increase(a[30s]))", 6.0),
        ("sum(rate(a[30s]))", 0.2),
        ("sum(a offset 15s)", 5.0),
        ("sum(max_over_time(a[30s]))", 5.0),
        ("sum(min_over_time(a[15s]))", 1.0),
        ("2 * sum(a) + 1", 3.0),
        ("sum(a) > 1", None),
        ("sum(a) > scalar(max(a)) - 1", 1.0),
        # Without exactly one element, the scalar is not a number.
        ("sum(a) > scalar(b)", None),
        ("sum(a) and sum(b)", None),
        ("sum(a) unless sum(b)", 1.0),
    ],
)
def test_promql_evaluation(expression, value):
    found = evaluate(expression, Data(ONE), 30.0)
    assert list(found.values()) == ([] if value is None else [pytest.approx(value)])


def test_a_series_without_samples_for_five_minutes_is_stale():
    assert evaluate("a", Data(ONE), 329.0)
    assert not evaluate("a", Data(ONE), 331.0)


@pytest.mark.parametrize(
    "expression",
    ["deriv(a[1m])", "topk(3, a)", "sum without (x) (a)", "a > bool 1", "a[1h:5m]", "a @ 5", "-a"],
)
def test_unsupported_promql_is_reported(expression):
    with pytest.raises(Unsupported):
        evaluate(expression, Data(ONE), 30.0)
