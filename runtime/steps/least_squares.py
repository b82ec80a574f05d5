"""Small least squares problems in plain Python, because the coordinator installs without numpy."""

from __future__ import annotations

import math
from collections.abc import Sequence


def non_negative(
    matrix: Sequence[Sequence[float]],
    vector: Sequence[float],
    centre: Sequence[float],
    ridge: float,
) -> list[float]:
    """Least squares by normal equations with a ridge towards `centre`; no result below 0.

    Coefficients that come out negative are set to 0 one by one, the most negative first.
    """
    free = list(range(len(vector)))
    found = [0.0] * len(vector)
    while free:
        solved = _solve(
            [[matrix[row][column] + ridge * (row == column) for column in free] for row in free],
            [vector[row] + ridge * centre[row] for row in free],
        )
        worst = min(range(len(free)), key=solved.__getitem__)
        if solved[worst] >= 0:
            for index, value in zip(free, solved, strict=True):
                found[index] = value
            break
        del free[worst]
    return found


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solves a symmetric, positive definite system by Cholesky decomposition."""
    size = len(vector)
    lower: list[list[float]] = []
    values: list[float] = []
    for row in range(size):
        entries: list[float] = []
        for column in range(row):
            above = lower[column]
            total = matrix[row][column] - sum(map(float.__mul__, entries, above))
            entries.append(total / above[column])
        pivot = matrix[row][row] - sum(entry * entry for entry in entries)
        # Only rounding can make the pivot negative.
        entries.append(math.sqrt(max(pivot, 1e-12 * matrix[row][row])))
        values.append((vector[row] - sum(map(float.__mul__, entries, values))) / entries[row])
        lower.append(entries)
    for row in reversed(range(size)):
        solved = sum(lower[other][row] * values[other] for other in range(row + 1, size))
        values[row] = (values[row] - solved) / lower[row][row]
    return values
