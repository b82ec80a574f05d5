"""Makes the operating system provide memory before a step first writes to it.

New memory is provided page by page, at the first write: 0.3 ms per MiB on a machine of its own. A
virtual machine may have to get the page from its host first, which took 5 to 140 ms per MiB. A step
that stores KV blocks in new memory would take that much longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton.kvtransfer.arena import MADV_POPULATE_WRITE

logger = logging.getLogger(__name__)

# Memory that is provided ahead of the used one, of all arrays together, and in one call: meanwhile,
# the process cannot map other memory.
AHEAD_BYTES, _CALL_BYTES = 128 * 2**20, 256 * 2**10
# Other threads of the process go first.
_NICENESS = 19


class MemoryAhead:
    """Provides the rows of some arrays in order, a bounded number ahead of the used ones.

    One thread calls `use` and `close`.

    Args:
        arrays: Arrays with as many rows; the rows are used from the first one on. They must stay
            alive until `close`.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[np.int8]]) -> None:
        self._arrays: Sequence[npt.NDArray[np.int8]] = arrays
        row_bytes = sum(array.shape[1] for array in arrays)
        self._num_ahead = max(1, AHEAD_BYTES // max(1, row_bytes))
        self._num_rows = min((len(array) for array in arrays), default=0)
        widest_bytes = max((array.shape[1] for array in arrays), default=1)
        self._num_at_once = max(1, _CALL_BYTES // max(1, widest_bytes))
        self._changed = threading.Condition()
        self._num_wanted = min(self._num_rows, self._num_ahead)
        self._num_provided, self._is_closed = 0, False
        self._thread = threading.Thread(target=self._run, name="baton-memory-ahead", daemon=True)
        self._thread.start()

    @property
    def num_provided(self) -> int:
        """Number of rows, from the first one, that are provided; for tests."""
        return self._num_provided

    def use(self, num_rows: int) -> None:
        """Says that the first `num_rows` rows may be used."""
        wanted = min(self._num_rows, num_rows + self._num_ahead)
        num_more = wanted - self._num_wanted
        # In steps of a quarter, so that the thread is seldom woken.
        if num_more > self._num_ahead // 4 or (num_more > 0 and wanted == self._num_rows):
            with self._changed:
                self._num_wanted = wanted
                self._changed.notify()

    def close(self) -> None:
        """Ends the thread, at the latest after one call to the operating system. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        self._arrays = ()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        # A rank is bound to cores that its model keeps busy.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or self._num_provided < self._num_wanted
                )
                if self._is_closed or self._num_provided >= self._num_rows:
                    return
                first = self._num_provided
                end = min(self._num_wanted, first + self._num_at_once)
            if not all(self._provide(array[first:end]) for array in self._arrays):
                return
            self._num_provided = end

    def _provide(self, rows: npt.NDArray[np.int8]) -> bool:
        """Provides the pages of these rows without changing a byte.

        Returns:
            Whether the operating system can do it (Linux 5.14 and later), and the thread goes on.
        """
        begin = rows.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        end = rows.ctypes.data + rows.nbytes
        for address in range(begin, end, _CALL_BYTES):
            if self._is_closed:
                return False
            size = min(_CALL_BYTES, end - address)
            if _libc.madvise(address, size, MADV_POPULATE_WRITE):
                why = os.strerror(ctypes.get_errno())
                logger.info("memory for the KV store is provided when it is first used: %s", why)
                return False
        return True


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
