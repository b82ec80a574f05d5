"""Which columns of a table there is room for."""

from __future__ import annotations

from collections.abc import Sequence


def shown(
    names: Sequence[str], widths: Sequence[int], spare: Sequence[str], room: int, gap: int
) -> list[int]:
    """The columns to show, by their indices: a column that is left out is better than one cut.

    Args:
        names: of all columns.
        widths: that they need.
        spare: names of those that are left out where there is no room, in this order.
        room: characters of a line.
        gap: characters between two columns.
    """
    left = list(range(len(names)))
    for name in spare:
        if sum(widths[index] for index in left) + gap * (len(left) - 1) <= room:
            break
        left = [index for index in left if names[index] != name]
    return left
