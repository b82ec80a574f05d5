"""Faster starts: few garbage collections while a process imports its modules."""

from __future__ import annotations

import gc

# Number of new objects after which a collection runs. Imports make about as many objects, all of
# which stay, so that Python's usual collections would take a sixth of the imports' time.
_RARELY = 100_000
_USUAL = gc.get_threshold()


def collect_rarely() -> None:
    """Makes garbage collections rare, until `collect_as_usual`."""
    gc.set_threshold(_RARELY, *_USUAL[1:])


def collect_as_usual() -> None:
    """Makes garbage collections as frequent, and each as short, as Python does by itself."""
    gc.set_threshold(*_USUAL)
