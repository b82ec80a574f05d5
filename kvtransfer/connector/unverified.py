"""Blocks whose content may turn out wrong: loads fill them, in steps that have not ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import NamedTuple


class _Filling(NamedTuple):
    """What a load fills.

    Attributes:
        block_ids: the blocks that are filled.
        affected: all blocks whose content is wrong if one of those is.
    """

    block_ids: Collection[int]
    affected: Collection[int]


class UnverifiedBlocks:
    """Follows what loads fill, and what is computed after it, until the loads' steps have ended.

    vLLM may make a step while another one runs, and ends them in order.
    """

    def __init__(self) -> None:
        # Of the step that is made next.
        self._coming: list[_Filling] = []
        self._unfinished: deque[list[_Filling]] = deque()

    def load(self, block_ids: Collection[int], affected: Collection[int]) -> None:
        """A load of the step that is made next fills blocks.

        Args:
            block_ids: the blocks that it fills.
            affected: these, and those of the request behind them.
        """
        self._coming.append(_Filling(block_ids, affected))

    def follow(self, block_ids: Sequence[int]) -> None:
        """A request has these blocks: what it computes behind one that is being filled is affected.

        Args:
            block_ids: its blocks, in their order.
        """
        for fillings in self._all():
            filled = set[int]().union(*(one.affected for one in fillings))
            found = [at for at, block_id in enumerate(block_ids) if block_id in filled]
            if found:
                fillings.append(_Filling([block_ids[at] for at in found], block_ids[found[0] :]))

    def step_made(self) -> None:
        self._unfinished.append(self._coming)
        self._coming = []

    def step_finished(self) -> None:
        """The oldest step has ended: what it loaded is right, or was asked for by `distrust`."""
        self._unfinished.popleft()

    def block_ids(self) -> set[int]:
        """All blocks whose content may turn out wrong."""
        return {
            block_id for fillings in self._all() for one in fillings for block_id in one.affected
        }

    def distrust(self, invalid_block_ids: Collection[int]) -> set[int]:
        """The blocks whose content is wrong because it is in others.

        Args:
            invalid_block_ids: those that loads of the oldest step failed to fill.
        """
        wrong = set(invalid_block_ids)
        untrusted: set[int] = set()
        for fillings in self._unfinished:
            for one in fillings:
                if not (wrong | untrusted).isdisjoint(one.block_ids):
                    untrusted.update(one.affected)
        return untrusted

    def _all(self) -> list[list[_Filling]]:
        """By step, the one that is made next first."""
        return [fillings for fillings in (self._coming, *self._unfinished) if fillings]
