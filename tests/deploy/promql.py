"""Evaluator for the subset of PromQL that the rules and dashboards use.

promql-parser parses the expressions. An unsupported expression raises Unsupported. The semantics
follow Prometheus 2.42 (promql/engine.go, functions.go, quantile.go). promtool of that version gives
the same results for deploy/prometheus/rules_test.yaml.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser as ast

# Prometheus ignores samples older than this many seconds in instant queries.
LOOKBACK_S = 300.0

Labels = frozenset  # Pairs of label name and value.
Vector = dict  # Maps Labels to a float value.

_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_ARITHMETIC = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else (math.nan if not a else math.copysign(math.inf, a)),
}
_AGGREGATE = {
    "sum": math.fsum,
    "max": max,
    "min": min,
    "avg": lambda values: math.fsum(values) / len(values),
    "count": lambda values: float(len(values)),
}


class Unsupported(Exception):
    """Raised for PromQL that this evaluator does not support."""


@dataclass
class Series:
    """One time series: labels including `__name__`, and samples sorted by time in seconds."""

    labels: Labels
    times: list[float]
    values: list[float]


class Data:
    """All series of one evaluation, by metric name."""

    def __init__(self, series: list[Series]) -> None:
        self._by_name: dict[str, list[Series]] = {}
        for one in series:
            self._by_name.setdefault(dict(one.labels)["__name__"], []).append(one)

    def matching(self, selector: ast.VectorSelector) -> list[Series]:
        if not selector.name or selector.at is not None or selector.matchers.or_matchers:
            raise Unsupported(f"selector: {selector}")
        return [
            one
            for one in self._by_name.get(selector.name, [])
            if all(_matches(matcher, dict(one.labels)) for matcher in selector.matchers.matchers)
        ]


def _matches(matcher: ast.Matcher, labels: dict[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    if matcher.op == ast.MatchOp.Equal:
        return value == matcher.value
    if matcher.op == ast.MatchOp.NotEqual:
        return value != matcher.value
    found = re.fullmatch(matcher.value, value) is not None
    return found if matcher.op == ast.MatchOp.Re else not found


def evaluate(expression: str | ast.Expr, data: Data, at_s: float) -> Vector | float:
    """Evaluates an expression at the time `at_s`, in seconds."""
    node = ast.parse(expression) if isinstance(expression, str) else expression
    match node:
        case ast.NumberLiteral():
            return node.val
        case ast.ParenExpr():
            return evaluate(node.expr, data, at_s)
        case ast.VectorSelector():
            return _instant(node, data, at_s)
        case ast.AggregateExpr():
            return _aggregate(node, data, at_s)
        case ast.BinaryExpr():
            return _binary(node, data, at_s)
        case ast.Call():
            return _call(node, data, at_s)
    raise Unsupported(f"{type(node).__name__}: {node.prettify()}")


def _offset_s(selector: ast.VectorSelector) -> float:
    return selector.offset.total_seconds() if selector.offset else 0.0


def _instant(node: ast.VectorSelector, data: Data, at_s: float) -> Vector:
    at_s -= _offset_s(node)
    found = Vector()
    for one in data.matching(node):
        index = bisect_right(one.times, at_s) - 1
        if index >= 0 and at_s - one.times[index] < LOOKBACK_S:
            found[one.labels] = one.values[index]
    return found


def _unnamed(labels: Labels) -> Labels:
    return Labels(pair for pair in labels if pair[0] != "__name__")


def _aggregate(node: ast.AggregateExpr, data: Data, at_s: float) -> Vector:
    kind = str(node.op)
    if kind not in _AGGREGATE or node.param is not None:
        raise Unsupported(f"aggregation: {node.prettify()}")
    by: set[str] = set()
    if node.modifier is not None:
        if node.modifier.type != ast.AggModifierType.By:
            raise Unsupported(f"without: {node.prettify()}")
        by = set(node.modifier.labels)
    groups: dict[Labels, list[float]] = {}
    for labels, value in evaluate(node.expr, data, at_s).items():
        group = Labels(pair for pair in labels if pair[0] in by)
        groups.setdefault(group, []).append(value)
    return {labels: _AGGREGATE[kind](values) for labels, values in groups.items()}


def _binary(node: ast.BinaryExpr, data: Data, at_s: float) -> Vector | float:
    kind, modifier = str(node.op), node.modifier
    left, right = evaluate(node.lhs, data, at_s), evaluate(node.rhs, data, at_s)
    if modifier is not None and (modifier.return_bool or modifier.group_labels):
        raise Unsupported(f"bool or group: {node.prettify()}")
    if kind in ("and", "or", "unless"):
        keys = {_key(labels, modifier) for labels in right}
        if kind == "or":
            keys = {_key(labels, modifier) for labels in left}
            return left | {k: v for k, v in right.items() if _key(k, modifier) not in keys}
        wanted = kind == "and"
        return {k: v for k, v in left.items() if (_key(k, modifier) in keys) is wanted}
    if kind in _COMPARE:
        return _compare(_COMPARE[kind], left, right, modifier)
    if kind in _ARITHMETIC:
        return _calculate(_ARITHMETIC[kind], left, right, modifier)
    raise Unsupported(f"operator {kind}: {node.prettify()}")


def _key(labels: Labels, modifier: ast.BinModifier | None) -> Labels:
    if modifier is None or modifier.matching is None:
        return _unnamed(labels)
    named = set(modifier.matching.labels)
    include = modifier.matching.type == ast.LabelModifierType.Include
    return Labels(pair for pair in _unnamed(labels) if (pair[0] in named) is include)


def _pairs(left: Vector, right: Vector, modifier):
    """Yields left labels, left value and right value of each one-to-one match."""
    by_key = {_key(labels, modifier): value for labels, value in right.items()}
    keys = [_key(labels, modifier) for labels in left]
    if len(by_key) < len(right) or len(set(keys)) < len(keys):
        raise Unsupported("many-to-many matching")
    for key, (labels, value) in zip(keys, left.items(), strict=True):
        if key in by_key:
            yield labels, value, by_key[key]


def _compare(compare, left, right, modifier) -> Vector:
    if isinstance(left, float):
        raise Unsupported("a number on the left of a comparison")
    if isinstance(right, float):
        return {labels: value for labels, value in left.items() if compare(value, right)}
    return {k: a for k, a, b in _pairs(left, right, modifier) if compare(a, b)}


def _calculate(calculate, left, right, modifier) -> Vector | float:
    if isinstance(left, float) and isinstance(right, float):
        return calculate(left, right)
    if isinstance(left, float):
        return {_unnamed(labels): calculate(left, value) for labels, value in right.items()}
    if isinstance(right, float):
        return {_unnamed(labels): calculate(value, right) for labels, value in left.items()}
    return {_key(k, modifier): calculate(a, b) for k, a, b in _pairs(left, right, modifier)}


def _call(node: ast.Call, data: Data, at_s: float) -> Vector | float:
    match node.func.name:
        case "rate" | "increase":
            (window,) = node.args
            return _increase(window, data, at_s, per_second=node.func.name == "rate")
        case "max_over_time" | "min_over_time":
            (window,) = node.args
            most = max if node.func.name == "max_over_time" else min
            windows = _windows(window, data, at_s)
            return {_unnamed(one): most(values) for one, _, values in windows if values}
        case "histogram_quantile":
            quantile, buckets = node.args
            return _quantiles(evaluate(quantile, data, at_s), evaluate(buckets, data, at_s))
        case "scalar":
            (vector,) = node.args
            values = list(evaluate(vector, data, at_s).values())
            return values[0] if len(values) == 1 else math.nan
        case "absent":
            (selector,) = node.args
            if not isinstance(selector, ast.VectorSelector):
                raise Unsupported(f"absent of no selector: {node.prettify()}")
            if evaluate(selector, data, at_s):
                return {}
            equal = [m for m in selector.matchers.matchers if m.op == ast.MatchOp.Equal]
            return {Labels((m.name, m.value) for m in equal): 1.0}
    raise Unsupported(f"function {node.func.name}")


def _increase(window: ast.MatrixSelector, data: Data, at_s: float, *, per_second: bool) -> Vector:
    """Computes rate or increase of counters, as extrapolatedRate in functions.go does."""
    range_s = window.range.total_seconds()
    end_s = at_s - _offset_s(window.vector_selector)
    start_s, found = end_s - range_s, Vector()
    for labels, times, values in _windows(window, data, at_s):
        if len(times) < 2:
            continue
        resets = math.fsum(a for a, b in itertools.pairwise(values) if b < a)
        increase = values[-1] - values[0] + resets
        sampled_s = times[-1] - times[0]
        step_s = sampled_s / (len(times) - 1)
        before_s, after_s = times[0] - start_s, end_s - times[-1]
        if increase > 0 and values[0] >= 0:
            before_s = min(before_s, sampled_s * values[0] / increase)
        for gap_s in (before_s, after_s):
            sampled_s += gap_s if gap_s < 1.1 * step_s else step_s / 2
        factor = sampled_s / (times[-1] - times[0]) / (range_s if per_second else 1.0)
        found[_unnamed(labels)] = increase * factor
    return found


def _windows(
    window: ast.MatrixSelector, data: Data, at_s: float
) -> Iterator[tuple[Labels, list[float], list[float]]]:
    """Yields the labels, times and values of each series in a range; both ends are included."""
    end_s = at_s - _offset_s(window.vector_selector)
    start_s = end_s - window.range.total_seconds()
    for one in data.matching(window.vector_selector):
        first, last = bisect_left(one.times, start_s), bisect_right(one.times, end_s)
        yield one.labels, one.times[first:last], one.values[first:last]


def _quantiles(quantile: float, buckets: Vector) -> Vector:
    """Computes histogram_quantile, as bucketQuantile in quantile.go does."""
    histograms: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = dict(labels).get("le")
        if bound is not None:
            key = Labels(pair for pair in labels if pair[0] not in ("__name__", "le"))
            histograms.setdefault(key, []).append((float(bound), count))
    return {labels: _quantile(quantile, sorted(found)) for labels, found in histograms.items()}


def _quantile(quantile: float, buckets: list[tuple[float, float]]) -> float:
    no_samples = len(buckets) < 2 or buckets[-1][0] != math.inf or buckets[-1][1] == 0
    if no_samples or math.isnan(quantile):
        return math.nan
    rank = quantile * buckets[-1][1]
    index = next(
        i for i, (_, count) in enumerate(buckets) if count >= rank or i == len(buckets) - 1
    )
    if index == len(buckets) - 1:
        return buckets[-2][0]
    upper, count = buckets[index]
    lower, below = buckets[index - 1] if index else (0.0, 0.0)
    return lower + (upper - lower) * (rank - below) / (count - below)
