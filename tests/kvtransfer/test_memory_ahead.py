"""Memory of the KV store that is provided before its first use."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from baton.kvtransfer.connector.tiers import memory_ahead
from baton.kvtransfer.connector.tiers.memory_ahead import MemoryAhead

ROW_BYTES, NUM_ROWS, NUM_AHEAD = 4 * mmap.PAGESIZE, 64, 16
# Longest wait for the thread.
DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def _little_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ahead, "AHEAD_BYTES", 2 * NUM_AHEAD * ROW_BYTES)


@pytest.fixture
def arrays() -> Iterator[list[npt.NDArray[np.int8]]]:
    """Two arrays of memory that nothing has written to."""
    with mmap.mmap(-1, NUM_ROWS * ROW_BYTES) as one, mmap.mmap(-1, NUM_ROWS * ROW_BYTES) as two:
        made = [np.frombuffer(each, np.int8).reshape(NUM_ROWS, ROW_BYTES) for each in (one, two)]
        yield made
        made.clear()


def wait_until(ahead: MemoryAhead, num_rows: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while ahead.num_provided < num_rows:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def num_resident(array: npt.NDArray[np.int8]) -> int:
    """Pages of the array's mapping that the process has."""
    found, is_here = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            begin, dash, rest = line.split()[0].partition("-")
            if dash:
                end = rest.split()[0]
                is_here = int(begin, 16) <= array.ctypes.data < int(end, 16)
            elif is_here and line.startswith("Rss:"):
                found = int(line.split()[1]) * 1024 // mmap.PAGESIZE
    return found


def test_memory_is_provided_ahead_of_its_use_and_keeps_its_bytes(
    arrays: list[npt.NDArray[np.int8]],
) -> None:
    ahead = MemoryAhead(arrays)
    wait_until(ahead, NUM_AHEAD)
    for array in arrays:
        array[: 2 * NUM_AHEAD] = 7
    ahead.use(2 * NUM_AHEAD)
    wait_until(ahead, 3 * NUM_AHEAD)
    ahead.use(NUM_ROWS)
    wait_until(ahead, NUM_ROWS)
    for array in arrays:
        assert (array[: 2 * NUM_AHEAD] == 7).all()
        assert not array[2 * NUM_AHEAD :].any()
    assert num_resident(arrays[0]) >= NUM_ROWS * ROW_BYTES // mmap.PAGESIZE
    ahead.close()
    ahead.close()


def test_no_more_memory_is_provided_than_the_bound(arrays: list[npt.NDArray[np.int8]]) -> None:
    threads = set(threading.enumerate())
    ahead = MemoryAhead(arrays)
    wait_until(ahead, NUM_AHEAD)
    ahead.close()
    assert ahead.num_provided == NUM_AHEAD
    assert set(threading.enumerate()) <= threads


def test_an_operating_system_that_cannot_provide_it_changes_nothing(
    arrays: list[npt.NDArray[np.int8]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_ahead, "MADV_POPULATE_WRITE", 12345)
    ahead = MemoryAhead(arrays)
    ahead._thread.join(DEADLINE_S)
    assert not ahead._thread.is_alive()
    ahead.use(NUM_ROWS)
    ahead.close()
    assert ahead.num_provided == 0
