"""Words for a number of things in messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """The number with its noun, such as "1 worker" or "2 workers"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
