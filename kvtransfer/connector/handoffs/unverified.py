"""Tracks blocks whose content may turn out wrong: loads fill them in steps that have not ended."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from baton.runtime.kv.kv_groups import NULL_BLOCK, KvGroup


class _Filling(NamedTuple):
    """The blocks of one load.

    Attributes:
        block_ids: Blocks that the load fills.
        affected: All blocks whose content is wrong if one of block_ids is wrong.
    """

    block_ids: Collection[int]
    affected: Collection[int]


class UnverifiedBlocks:
    """Tracks blocks that loads fill, and blocks computed from them, until the loads' steps end.

    vLLM may make a step while another one runs, and ends steps in order. HandoffScheduler owns
    this object.

    Args:
        tables: The first group of each of the engine's block tables.
    """

    def __init__(self, tables: Sequence[KvGroup]) -> None:
        self._tables = tables
        # Fillings of the step that is made next.
        self._next: list[_Filling] = []
        self._unfinished: deque[list[_Filling]] = deque()

    def load(
        self, block_ids: Collection[int], tables: Sequence[Sequence[int]], first_token: int
    ) -> None:
        """Adds a load of the step that is made next.

        Args:
            block_ids: Blocks that the load fills.
            tables: All blocks of the request, by table.
            first_token: Index of the first token that the load brings. The request's blocks with
                this token or later ones are wrong if one of block_ids is wrong.
        """
        affected = [block_id for end, block_id in self._placed(tables) if end > first_token]
        self._next.append(_Filling(block_ids, affected))

    def follow(self, tables: Sequence[Sequence[int]]) -> None:
        """Marks blocks that a request computes from blocks that are being filled as affected.

        Args:
            tables: All blocks of the request, by table.
        """
        for fillings in self._all():
            filled = set[int]().union(*(each.affected for each in fillings))
            placed = list(self._placed(tables))
            found = [(end, block_id) for end, block_id in placed if block_id in filled]
            if found:
                first_end = min(end for end, _ in found)
                affected = [block_id for end, block_id in placed if end >= first_end]
                fillings.append(_Filling([block_id for _, block_id in found], affected))

    def _placed(self, tables: Sequence[Sequence[int]]) -> Iterator[tuple[float, int]]:
        """Yields the blocks that a request keeps, each with the index after its last token."""
        for table, block_ids in zip(self._tables, tables, strict=True):
            for at, block_id in enumerate(block_ids):
                if block_id != NULL_BLOCK:
                    is_state = table.kind == "state"
                    yield math.inf if is_state else (at + 1) * table.block_size_tokens, block_id

    def step_made(self) -> None:
        """Closes the step that is made now; later loads belong to the following step."""
        self._unfinished.append(self._next)
        self._next = []

    def step_finished(self) -> None:
        """Forgets the oldest step: it has ended, and `distrust` was called for its failed loads."""
        self._unfinished.popleft()

    def block_ids(self) -> set[int]:
        """Returns all blocks whose content may turn out wrong."""
        return {
            block_id for fillings in self._all() for each in fillings for block_id in each.affected
        }

    def distrust(self, invalid_block_ids: Collection[int]) -> set[int]:
        """Returns the blocks whose content is wrong because the given blocks are wrong.

        Args:
            invalid_block_ids: Blocks that loads of the oldest step failed to fill.
        """
        wrong = set(invalid_block_ids)
        untrusted: set[int] = set()
        for fillings in self._unfinished:
            for each in fillings:
                if not (wrong | untrusted).isdisjoint(each.block_ids):
                    untrusted.update(each.affected)
        return untrusted

    def _all(self) -> list[list[_Filling]]:
        """Returns the non-empty steps; the step that is made next comes first."""
        return [fillings for fillings in (self._next, *self._unfinished) if fillings]
