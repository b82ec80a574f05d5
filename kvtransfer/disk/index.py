"""Which KV blocks the disk holds; runs beside the engine's scheduler and touches no file.

A block counts as held when every rank has written its part. Each load and each write keeps a block
of host memory reserved until every rank has reported its end, also when the result is not wanted
any more, because a rank may still read or write there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from baton.kvtransfer.block_changes import BlockChanges, CacheChange
from baton.kvtransfer.disk.orders import (
    BlockName,
    BlockSelection,
    Delete,
    DeleteSelected,
    DiskReport,
    Load,
    Order,
    Write,
)

# The disk hangs if orders are under way and none of their kind gets on for this long.
TIMEOUT_S = 10.0
# Most of this time that passes between two looks at the clock. An idle engine makes no steps, so
# ranks cannot report meanwhile.
_MOST_UNSEEN_S = 1.0
# Most deletions that are remembered during the search for blocks of an earlier worker. After more
# of them, no block that is found later is kept.
_MOST_DELETIONS = 256


@dataclass(slots=True)
class _Progress:
    """Progress of the loads, or of the writes and deletions, which one thread of a rank makes.

    Attributes:
        num: Orders that have not ended in all ranks.
        at: When a rank last ended an order or deleted a file, or when the first order was given.
    """

    num: int = 0
    at: float = 0.0

    def begin(self, now: float) -> None:
        """Counts an order."""
        if not self.num:
            self.at = now
        self.num += 1

    def end(self, now: float, *, in_all_ranks: bool) -> None:
        """Notes that an order has ended in a rank."""
        self.at = now
        self.num -= in_all_ranks

    def is_late(self, now: float) -> bool:
        """Whether the disk hangs."""
        return self.num > 0 and now - self.at > TIMEOUT_S


@dataclass(slots=True)
class _Deletion:
    """A DeleteSelected.

    Attributes:
        num_missing: Ranks that have not reported its end.
        done: False once a rank has failed.
        is_taken: Whether its result was taken before its end.
    """

    num_missing: int
    done: bool = True
    is_taken: bool = False


@dataclass(slots=True)
class _Job:
    """A write or a load under way.

    Attributes:
        order: The order.
        num_missing: Ranks that have not reported its end.
        done: False once a rank has failed.
        wanted: False once the result must not be used.
    """

    order: Write | Load
    num_missing: int
    done: bool = True
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class Ended:
    """A write or a load that has ended in all ranks; its block in host memory is free to use.

    Attributes:
        key: The engine's hash of the block.
        slot: Index of the block in host memory.
        is_load: Whether it was a load.
        done: Whether host memory, after a load, or the disk, after a write, holds the block.
        wanted: False if host memory was emptied meanwhile; `done` is then False too.
    """

    key: bytes
    slot: int
    is_load: bool
    done: bool
    wanted: bool


@dataclass(slots=True)
class DiskCounts:
    """Wrong files and failures since the last report.

    Attributes:
        num_wrong: Files that were wrong.
        off: Why the disk is not used any more; set once.
    """

    num_wrong: int = 0
    off: str = ""


class DiskIndex:
    """The blocks on disk, and the orders that change them.

    Args:
        max_blocks: Number of blocks that the disk may hold; at least 1.
        max_writes: Most writes under way; further blocks are not written.
        num_ranks: Number of ranks.
        clock: Returns seconds; never goes back.

    Attributes:
        is_searching: Whether blocks of an earlier worker are still being looked for. Until then
            nothing is written, because the room for it is not known.
    """

    def __init__(
        self, max_blocks: int, max_writes: int, num_ranks: int, clock: Callable[[], float]
    ) -> None:
        self._max_blocks, self._max_writes, self._num_ranks = max_blocks, max_writes, num_ranks
        self._clock = clock
        # Time in which the engine made steps, up to the latest look at the clock.
        self._seen_at, self._stepped_s = clock(), 0.0
        self._load_progress, self._change_progress = _Progress(), _Progress()
        # The least recently used block first.
        self._blocks: OrderedDict[bytes, BlockName] = OrderedDict()
        self._jobs: dict[int, _Job] = {}
        # Writes that have not ended in all ranks, also those that are not wanted any more.
        self._num_writes = 0
        # Numbers of the jobs by the block's key.
        self._writing: dict[bytes, int] = {}
        self._loading: dict[bytes, int] = {}
        # By the number of the order.
        self._deletions: dict[int, _Deletion] = {}
        self._next_id = 0
        self._orders: list[Order] = []
        self._changes = BlockChanges()
        self._counts = DiskCounts()
        # Deletions during the search, whose files may still be found.
        self._deleted_meanwhile: list[BlockSelection] = []
        # Hashes of found blocks that are among these; the search finds the first blocks of a
        # prompt first.
        self._found_deleted: set[int] = set()
        self.off = ""
        self.is_searching = False

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        """Whether a block can be loaded."""
        return not self.off and key in self._blocks

    def get(self, key: bytes) -> BlockName:
        """Returns a block that the disk holds."""
        return self._blocks[key]

    def parents(self) -> Iterator[tuple[int, int]]:
        """Yields the hashes of the blocks on disk, and of the blocks before them; see BlockName."""
        return ((block.hash, block.parent) for block in self._blocks.values())

    @property
    def has_orders(self) -> bool:
        """Whether the ranks must be given orders."""
        return bool(self._orders)

    @property
    def num_loads(self) -> int:
        """Number of blocks that are being loaded."""
        return len(self._loading)

    @property
    def slots(self) -> set[int]:
        """Blocks of host memory that ranks read or write."""
        return {job.order.slot for job in self._jobs.values()}

    # ---- Orders

    def accepts(self, key: bytes) -> bool:
        """Whether a block in host memory should be written now."""
        return not (
            self.off
            or self.is_searching
            or key in self._blocks
            or key in self._writing
            or self._num_writes >= self._max_writes
            or (self._is_full and self._least_used() is None)
        )

    def write(self, block: BlockName, slot: int) -> None:
        """Writes a block that `accepts` has accepted from its place in host memory.

        If there is no room, the blocks that were unused for longest are deleted first: a rank
        carries out deletions and writes in their order, so its files are never too many.
        """
        while self._is_full and (least_used := self._least_used()) is not None:
            self._forget(least_used)
        self._num_writes += 1
        self._writing[block.key] = self._begin(Write(self._next_id, block, slot))

    @property
    def _is_full(self) -> bool:
        """Whether there is no room for another block."""
        return len(self._blocks) + self._num_writes >= self._max_blocks

    def _least_used(self) -> bytes | None:
        """Returns the block to evict; blocks that are being loaded stay."""
        return next((key for key in self._blocks if key not in self._loading), None)

    def load(self, key: bytes, slot: int) -> None:
        """Loads a block that the disk holds to its place in host memory."""
        self._loading[key] = self._begin(Load(self._next_id, self._blocks[key], slot))

    def _begin(self, order: Write | Load) -> int:
        self._next_id += 1
        self._jobs[order.order_id] = _Job(order, self._num_ranks)
        self._progress_of(order).begin(self._now())
        self._orders.append(order)
        return order.order_id

    def _progress_of(self, order: Write | Load) -> _Progress:
        return self._load_progress if isinstance(order, Load) else self._change_progress

    def used(self, keys: Sequence[bytes]) -> None:
        """Notes a use of a prompt's blocks, given in their order."""
        # The last block is evicted first: without a block, the blocks after it are of no use.
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def is_lost(self, key: bytes) -> bool:
        """Whether a load under way must not be waited for."""
        return bool(self.off) and key in self._loading

    def check_time(self) -> None:
        """Turns the disk off if it hangs; called in every step.

        A disk that is busy ends some orders while others wait for their turn.
        """
        now = self._now()
        if self._load_progress.is_late(now):
            self.turn_off(f"no load has ended for {TIMEOUT_S:g} s")
        if self._change_progress.is_late(now):
            self.turn_off(f"no write or deletion has got on for {TIMEOUT_S:g} s")

    @property
    def hangs(self) -> bool:
        """Whether orders are under way that may never end."""
        both = self._load_progress, self._change_progress
        return any(progress.is_late(self._stepped_s) for progress in both)

    def _now(self) -> float:
        """Returns the time in which the engine made steps, in seconds."""
        now = self._clock()
        self._stepped_s += min(now - self._seen_at, _MOST_UNSEEN_S)
        self._seen_at = now
        return self._stepped_s

    def take_orders(self) -> list[Order]:
        """Returns the orders since the last call; the ranks begin them in the next step."""
        orders, self._orders = self._orders, []
        return orders

    # ---- Reports

    def found(self, blocks: Iterable[BlockName], num_wrong: int = 0) -> None:
        """Adds blocks of an earlier worker, the last used one first."""
        gone = []
        for block in blocks:
            if self.off or block.key in self._blocks or block.key in self._writing:
                continue
            if self._was_deleted(block):
                self._found_deleted.add(block.hash)
                gone.append(block)
                continue
            if self._is_full:
                gone.append(block)
                continue
            self._blocks[block.key] = block
            self._blocks.move_to_end(block.key, last=False)
            self._changes.store(block.hash)
        if gone:
            self._orders.append(Delete(gone))
        self._counts.num_wrong += num_wrong

    def end_search(self) -> None:
        """Notes that no more blocks of an earlier worker will be found."""
        self.is_searching = False
        self._deleted_meanwhile.clear()
        self._found_deleted.clear()

    def _was_deleted(self, block: BlockName) -> bool:
        """Whether an operator has deleted a block, or one before it, before the search found it."""
        if block.parent in self._found_deleted:
            return True
        both = (block.hash, block.parent) if block.parent else (block.hash,)
        return any(
            selection.includes(one, block.owner)
            for selection in self._deleted_meanwhile
            for one in both
        )

    def _note_deletion(self, selection: BlockSelection) -> None:
        """Remembers a deletion for the blocks that the search finds later."""
        if not self.is_searching:
            return
        self._deleted_meanwhile.append(selection)
        if len(self._deleted_meanwhile) > _MOST_DELETIONS:
            self._deleted_meanwhile = [BlockSelection()]

    def reported(self, report: DiskReport) -> list[Ended]:
        """Takes the reports of ranks; returns the jobs that have ended in all of them."""
        self._counts.num_wrong += report.num_wrong
        if report.off:
            self.turn_off(report.off)
        now, ended = self._now(), []
        if report.has_deleted:
            self._change_progress.at = now
        for order_id, done in report.ended:
            if order_id in self._deletions:
                self._deletion_ended(order_id, now, done=done)
                continue
            job = self._jobs[order_id]
            job.done = job.done and done
            job.num_missing -= 1
            self._progress_of(job.order).end(now, in_all_ranks=not job.num_missing)
            if not job.num_missing:
                del self._jobs[order_id]
                ended.append(self._end(job))
        return ended

    def _deletion_ended(self, order_id: int, now: float, *, done: bool) -> None:
        """Notes that a rank has carried out a DeleteSelected."""
        deletion = self._deletions[order_id]
        deletion.done = deletion.done and done
        deletion.num_missing -= 1
        self._change_progress.end(now, in_all_ranks=not deletion.num_missing)
        if deletion.is_taken and not deletion.num_missing:
            del self._deletions[order_id]

    def _end(self, job: _Job) -> Ended:
        block, is_load = job.order.block, isinstance(job.order, Load)
        under_way = self._loading if is_load else self._writing
        if under_way.get(block.key) == job.order.order_id:
            del under_way[block.key]
        done = job.done and job.wanted and not self.off
        if is_load and not job.done:
            # One rank's part is wrong: the parts of the others are of no use.
            self._forget(block.key)
        if not is_load:
            self._num_writes -= 1
            if done:
                self._blocks[block.key] = block
                self._changes.store(block.hash)
            elif block.key not in self._blocks and block.key not in self._writing:
                self._orders.append(Delete([block]))
        return Ended(block.key, job.order.slot, is_load, done, job.wanted)

    def _forget(self, key: bytes) -> None:
        if (block := self._blocks.pop(key, None)) is not None:
            self._changes.remove(block.hash)
            self._orders.append(Delete([block]))

    def turn_off(self, why: str) -> None:
        """Uses the disk no more; its files stay for the next worker."""
        if self.off:
            return
        self.off = self._counts.off = why
        self._blocks.clear()
        self._changes.clear()

    def host_emptied(self) -> None:
        """Makes the results of all jobs unwanted: host memory was emptied."""
        for job in self._jobs.values():
            job.wanted = False
        self._writing.clear()
        self._loading.clear()

    def clear(self) -> None:
        """Deletes all blocks."""
        self._note_deletion(BlockSelection())
        if blocks := list(self._blocks.values()):
            self._orders.append(Delete(blocks))
        self._blocks.clear()
        self._changes.clear()

    def delete(self, selection: BlockSelection) -> tuple[int, int]:
        """Deletes blocks.

        Returns:
            How many blocks are deleted, and the number for `take_deleted`.
        """
        self._note_deletion(selection)
        gone = [one for one in self._blocks.values() if selection.includes(one.hash, one.owner)]
        for block in gone:
            del self._blocks[block.key]
            self._changes.remove(block.hash)
        for job in self._jobs.values():
            if selection.includes(job.order.block.hash, job.order.block.owner):
                job.done = False
        order_id, self._next_id = self._next_id, self._next_id + 1
        self._deletions[order_id] = _Deletion(self._num_ranks)
        self._change_progress.begin(self._now())
        self._orders.append(DeleteSelected(order_id, selection))
        return len(gone), order_id

    def take_deleted(self, order_id: int) -> bool | None:
        """Returns whether all ranks have deleted everything; None: it must be waited for.

        False also means that the disk hangs: files may be left, or blocks in host memory that
        ranks read or write.
        """
        deletion = self._deletions[order_id]
        if not deletion.num_missing:
            del self._deletions[order_id]
            return deletion.done and not self.hangs
        deletion.is_taken = self.hangs
        return False if self.hangs else None

    def take_change(self) -> CacheChange | None:
        """Returns the changes since the last call; None for no change."""
        return self._changes.take()

    def check_integrity(self) -> None:
        """Raises AssertionError if blocks, jobs and their places in host memory do not agree."""
        assert not self._writing.keys() & self._blocks.keys()
        assert not self.off or not self._blocks
        assert len(self._blocks) + self._num_writes <= self._max_blocks
        writes = [job for job in self._jobs.values() if isinstance(job.order, Write)]
        assert len(writes) == self._num_writes <= self._max_writes
        slots = [job.order.slot for job in self._jobs.values()]
        assert len(slots) == len(set(slots))
        for under_way in (self._writing, self._loading):
            assert all(
                self._jobs[number].order.block.key == key for key, number in under_way.items()
            )
        assert all(0 < job.num_missing <= self._num_ranks for job in self._jobs.values())

    def take_counts(self) -> DiskCounts:
        """Returns what has happened since the last call."""
        counts, self._counts = self._counts, DiskCounts()
        return counts
