"""Rules and dashboards query only metrics and labels that the processes export."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.deploy.exported import names, samples
from tests.deploy.promql import Data, Series, evaluate

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))


def expressions() -> dict[str, str]:
    """Returns every PromQL expression, by alert name or by dashboard, panel and query."""
    found = {}
    rules = yaml.safe_load((DEPLOY / "prometheus" / "rules.yaml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            found[rule["alert"]] = rule["expr"]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", []):
                where = f"{path.stem}: {panel['title']}: {target['refId']}"
                found[where] = target["expr"].replace("$__rate_interval", "1m")
    return found


EXPRESSIONS = expressions()
EXPORTED = names()


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_metrics_and_their_labels_exist(where):
    used, grouped = set(), set()

    def visit(node):
        if isinstance(node, promql_parser.VectorSelector):
            used.add(node.name)
            asked = {matcher.name for matcher in node.matchers.matchers}
            assert asked <= EXPORTED.get(node.name, set()), node.name
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
        return True

    promql_parser.walk(promql_parser.parse(EXPRESSIONS[where]), visit)
    assert used
    assert used <= EXPORTED.keys()
    assert grouped <= set().union(*(EXPORTED[name] for name in used))


def comparisons(node):
    """Yields the comparisons that an expression combines with `and`, `or` and `unless`."""
    if isinstance(node, promql_parser.ParenExpr):
        yield from comparisons(node.expr)
    elif isinstance(node, promql_parser.BinaryExpr):
        if str(node.op) in ("and", "or", "unless"):
            yield from comparisons(node.lhs)
            yield from comparisons(node.rhs)
        else:
            yield node


def test_both_sides_of_a_comparison_have_matching_labels():
    times = [60.0 * n for n in range(8 * 60)]
    data = Data([Series(one, times, [value] * len(times)) for one, value in samples().items()])
    compared = set()
    alerts = [
        (alert, node)
        for alert, expression in EXPRESSIONS.items()
        if ":" not in alert
        for node in comparisons(promql_parser.parse(expression))
    ]
    for alert, node in alerts:
        left, right = (evaluate(side, data, times[-1]) for side in (node.lhs, node.rhs))
        if isinstance(right, float) or not left:
            # The right side is a number, or an idle cell has no such series.
            continue
        bare = [
            {frozenset(pair for pair in one if pair[0] != "__name__") for one in side}
            for side in (left, right)
        ]
        assert bare[0] & bare[1], alert
        compared.add(alert)
    assert len(compared) >= 7


def test_generated_files_are_committed(monkeypatch):
    monkeypatch.syspath_prepend(str(DEPLOY))
    generate = runpy.run_path(str(DEPLOY / "generate.py"))
    for path, text in generate["files"]().items():
        assert path.read_text() == text, f"{path}: run python deploy/generate.py"


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_complete(path):
    dashboard = json.loads(path.read_text())
    taken = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + across, place["y"] + down)
            for across in range(place["w"])
            for down in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        assert all(target["legendFormat"] for target in panel["targets"])
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        variables = set(re.findall(r"\$\{?(\w+)", json.dumps(panel)))
        known = {one["name"] for one in dashboard["templating"]["list"]} | {"__rate_interval"}
        assert variables <= known


def test_dashboards_do_not_replace_each_other():
    found = [json.loads(path.read_text()) for path in DASHBOARDS]
    assert len(found) == 3
    assert len({one["uid"] for one in found}) == len({one["title"] for one in found}) == 3
