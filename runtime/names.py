"""Help with names that nothing is called."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of an error about an unknown name: "; did you mean 'x'?", or "" when none is near.

    Args:
        name: what was written.
        known: what could have been meant.
        cutoff: how alike they must be, 0 to 1 (difflib's ratio).
    """
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""
