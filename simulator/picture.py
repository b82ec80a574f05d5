"""Draws a simulation as SVG: pool sizes, request rate, TTFT and ITL over time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from baton.coordinator.state.scaling_config import Targets
from baton.simulator.record import Moment

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 900, 130, 70, 40, 46
# Pixels between the extreme values and the border, which would hide a line drawn on it.
_MARGIN = 6
_COLOURS = ("#1f77b4", "#d62728", "#9ecae1", "#ff9896")
Line = tuple[str, list[float]]


def svg(moments: Sequence[Moment], targets: Targets, title: str) -> str:
    """Returns an SVG with four panels above each other that share the time axis."""
    times = [one.at_s for one in moments]
    # Two decisions can have the same time; the rate between them is undefined.
    rates = [
        after.num_arrived / (after.at_s - before.at_s) if after.at_s > before.at_s else math.nan
        for before, after in itertools.pairwise(moments)
    ]
    panels: list[tuple[str, list[Line], float | None]] = [
        (
            "workers",
            [
                ("prefill", [float(one.prefill) for one in moments]),
                ("decode", [float(one.decode) for one in moments]),
                ("prefill, starting and leaving too", [float(one.prefill_paid) for one in moments]),
                ("decode, starting and leaving too", [float(one.decode_paid) for one in moments]),
            ],
            None,
        ),
        ("requests/s", [("arrived", [math.nan, *rates][: len(moments)])], None),
        (
            "TTFT p95, ms",
            [("TTFT p95", [one.ttft_p95_s * 1e3 for one in moments])],
            # No single line fits a target that grows with the prompt.
            None
            if targets.ttft_s_per_1k_tokens or targets.ttft_s is None
            else targets.ttft_s * 1e3,
        ),
        (
            "ITL p95, ms",
            [("ITL p95", [one.itl_p95_s * 1e3 for one in moments])],
            targets.itl_s and targets.itl_s * 1e3,
        ),
    ]
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _LEFT + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
    ]
    for index, (name, lines, target) in enumerate(panels):
        parts += _panel(_TOP + index * (_HEIGHT + _GAP), name, times, lines, target)
    return "\n".join([*parts, "</svg>\n"])


def _panel(
    top: float, name: str, times: list[float], lines: list[Line], target: float | None
) -> list[str]:
    values = [value for _, line in lines for value in line if math.isfinite(value)]
    # The axis ends at 4 times the target, because a few huge values would flatten all others.
    most = max([*values, target or 0.0, 1e-9])
    if target is not None:
        most = min(most, 4 * target)
    end = max([*times, 1e-9])

    def x(at: float) -> float:
        return _LEFT + _WIDTH * at / end

    def y(value: float) -> float:
        return top + _MARGIN + (_HEIGHT - 2 * _MARGIN) * (1 - min(value, most) / most)

    parts = [
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#999"/>',
        f'<text x="{_LEFT - 6}" y="{y(most) + 4:.1f}" text-anchor="end">{most:.4g}</text>',
        f'<text x="{_LEFT - 6}" y="{y(0) + 4:.1f}" text-anchor="end">0</text>',
        f'<text x="{_LEFT}" y="{top - 6}">{escape(name)}</text>',
        f'<text x="{_LEFT + _WIDTH}" y="{top + _HEIGHT + 14}" text-anchor="end">{end:.0f} s</text>',
    ]
    if target is not None:
        parts.append(
            f'<line x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y(target):.1f}" y2="{y(target):.1f}" '
            'stroke="#555" stroke-dasharray="4 3"/>'
        )
    for index in reversed(range(len(lines))):
        label, line = lines[index]
        points = " ".join(
            f"{x(at):.1f},{y(value):.1f}"
            for at, value in zip(times, line, strict=True)
            if math.isfinite(value)
        )
        colour = _COLOURS[index]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        if len(lines) > 1:
            parts.append(
                f'<text x="{_LEFT + 90 + index * 200}" y="{top - 6}" fill="{colour}">'
                f"{escape(label)}</text>"
            )
    return parts
