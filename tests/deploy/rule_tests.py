"""Runs alerting rules against the series of promtool's unit tests.

It supports input_series and alert_rule_test of
https://prometheus.io/docs/prometheus/latest/configuration/unit_testing_rules/ and raises
Unsupported for anything else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import promql_parser as ast

from tests.deploy.promql import Data, Labels, Series, Unsupported, Vector, evaluate

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ITEM = re.compile(r"(-?[\d.]+)(?:([+-][\d.]+))?(?:x(\d+))?$")


def seconds(text: str) -> float:
    if not re.fullmatch(r"(\d+[smhd])+", text):
        raise Unsupported(f"duration {text!r}")
    return float(sum(int(n) * _UNITS_S[unit] for n, unit in re.findall(r"(\d+)([smhd])", text)))


def series(text: str, values: str, interval_s: float) -> Series:
    """Parses one entry of input_series.

    `_` is a missing sample. `aBxN` is the value a followed by N values, each increased by B.
    """
    selector = ast.parse(text)
    labels = {m.name: m.value for m in selector.matchers.matchers} | {"__name__": selector.name}
    samples: list[float | None] = []
    for item in values.split():
        if item.startswith("_"):
            samples += [None] * int(item[2:] or 1)
            continue
        found = _ITEM.match(item)
        if found is None:
            raise Unsupported(f"values {item!r}")
        first, step, times = float(found[1]), float(found[2] or 0), int(found[3] or 0)
        samples += [first + number * step for number in range(times + 1)]
    known = [(n * interval_s, value) for n, value in enumerate(samples) if value is not None]
    return Series(Labels(labels.items()), [t for t, _ in known], [v for _, v in known])


@dataclass(frozen=True)
class Alert:
    labels: Labels
    annotations: Labels


class Rule:
    """One alerting rule that can be evaluated over time."""

    def __init__(self, rule: dict) -> None:
        unknown = rule.keys() - {"alert", "expr", "for", "labels", "annotations"}
        if unknown:
            raise Unsupported(f"{rule['alert']}: {', '.join(sorted(unknown))}")
        self.name, self.expression = rule["alert"], ast.parse(rule["expr"])
        self.for_s = seconds(rule.get("for", "0s"))
        self._labels, self._annotations = rule["labels"], rule["annotations"]

    def firing(self, data: Data, until_s: float, step_s: float) -> set[Alert]:
        """Returns the alerts that fire at `until_s` when the rule is evaluated every `step_s`."""
        since: dict[Labels, float] = {}
        found = Vector()
        # Results before this time cannot affect the alert's `for` duration.
        at_s = max(0.0, until_s - self.for_s - step_s) // step_s * step_s
        while at_s <= until_s:
            found = evaluate(self.expression, data, at_s)
            since = {_bare(labels): since.get(_bare(labels), at_s) for labels in found}
            at_s += step_s
        values = {_bare(labels): value for labels, value in found.items()}
        return {
            self._alert(labels, values[labels])
            for labels, begun_s in since.items()
            if at_s - step_s - begun_s >= self.for_s
        }

    def _alert(self, labels: Labels, value: float) -> Alert:
        texts = {name: filled(text, labels, value) for name, text in self._annotations.items()}
        shown = dict(labels) | self._labels
        return Alert(Labels(shown.items()), Labels(texts.items()))


def _bare(labels: Labels) -> Labels:
    return Labels(pair for pair in labels if pair[0] != "__name__")


def filled(text: str, labels: Labels, value: float) -> str:
    """Fills a Prometheus annotation template; raises Unsupported for an unknown function."""

    def replaced(found: re.Match) -> str:
        match [part.strip() for part in found[1].split("|")]:
            case ["$value"]:
                return f"{value:g}"
            case ["$value", "humanizeDuration"]:
                if not 0.001 <= value < 60:
                    raise Unsupported(f"humanizeDuration of {value}")
                return f"{value:.4g}s" if value >= 1 else f"{value * 1e3:.4g}ms"
            case ["$value", "humanizePercentage"]:
                return f"{value * 100:.4g}%"
            case ["$value", function] if form := re.fullmatch(r'printf "%(\.\d)f"', function):
                return format(value, f"{form[1]}f")
            case [name] if name.startswith("$labels."):
                return dict(labels).get(name.removeprefix("$labels."), "")
        raise Unsupported(f"template {found[0]}")

    def with_label(found: re.Match) -> str:
        value = dict(labels).get(found[1], "")
        return found[2].replace("{{ . }}", value) if value else ""

    text = re.sub(r"\{\{ with \$labels\.(\w+) \}\}(.*?)\{\{ end \}\}", with_label, text)
    return re.sub(r"\{\{(.*?)\}\}", replaced, text)
