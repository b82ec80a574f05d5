"""Connects the host memory of vLLM's offloading to the disk tier below it (kvtransfer/disk).

A block goes to disk when host memory has it, and comes back to host memory when a waiting prompt
needs it. vLLM's own tier of files verifies nothing that it loads, so it is not used.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker

from baton.kvtransfer.connector.step_report import StepReport
from baton.kvtransfer.connector.tiers.host_memory import (
    HostBlocks,
    HostMemory,
    host_layers,
    host_pages,
)
from baton.kvtransfer.disk.directory import rank_directory, scan
from baton.kvtransfer.disk.index import DiskIndex
from baton.kvtransfer.disk.orders import BlockName, Order
from baton.kvtransfer.disk.rank_disk import RankDisk

_log = logging.getLogger(__name__)

# Key in kv_connector_extra_config; the value is the result of `disk_options`.
DISK = "baton_disk"
# Size of an allocation unit of file systems.
_UNIT_BYTES = 4096
# Blocks of an earlier worker that one step takes over.
_FOUND_PER_STEP = 2048
# Time that the search for these blocks gets before the engine starts without waiting for its end.
_SCAN_WAIT_S = 2.0
# Time for blocks that are being written when the engine ends.
SHUTDOWN_TIMEOUT_S = 3.0


def disk_options(directory: Path, namespace: bytes, disk_bytes: int) -> dict[str, Any]:
    """Returns the entries of kv_connector_extra_config that turn the disk tier on.

    Args:
        directory: The worker's directory, which it has locked.
        namespace: Namespace of the files (disk/directory.py).
        disk_bytes: Most bytes of all ranks.
    """
    options = {"directory": str(directory), "namespace": namespace.hex(), "bytes": disk_bytes}
    return {DISK: options}


def most_blocks(disk_bytes: int, payload_bytes: int, num_ranks: int) -> int:
    """Returns how many blocks the disk may hold.

    Args:
        disk_bytes: Most bytes of all ranks.
        payload_bytes: Bytes of one rank's part of a block.
        num_ranks: Number of ranks.
    """
    # The header is smaller than one unit.
    units = 1 + -(-payload_bytes // _UNIT_BYTES)
    return disk_bytes // (units * _UNIT_BYTES * num_ranks)


class DiskTier:
    """Runs beside vLLM's scheduler: the index, and the search for blocks of an earlier worker.

    Attributes:
        index: The blocks on disk.
    """

    def __init__(self, index: DiskIndex, directory: Path, num_ranks: int, payload: int) -> None:
        self.index = index
        index.is_searching = True
        # Blocks, the number of wrong files, and why the search has failed; None at its end.
        self._found: queue.SimpleQueue[tuple[list[BlockName], int, str] | None] = (
            queue.SimpleQueue()
        )
        scan = threading.Thread(
            target=self._scan,
            args=(directory, num_ranks, payload),
            name="baton-disk-scan",
            daemon=True,
        )
        scan.start()
        scan.join(_SCAN_WAIT_S)

    @classmethod
    def make(cls, extra: Mapping[str, Any], memory: HostMemory) -> DiskTier | None:
        """Returns None if the tier is off or holds no block."""
        if (options := extra.get(DISK)) is None:
            return None
        num_ranks, payload = memory.config.parallel.world_size, memory.cpu_page_size_per_worker
        max_blocks = most_blocks(options["bytes"], payload, num_ranks)
        if not max_blocks:
            _log.warning(
                "kv_store.disk_bytes is %d, less than one KV block: no disk is used",
                options["bytes"],
            )
            return None
        most_writes = HostBlocks.most_busy(memory.num_chunks)
        index = DiskIndex(max_blocks, most_writes, num_ranks, time.monotonic)
        return cls(index, Path(options["directory"]), num_ranks, payload)

    def _scan(self, directory: Path, num_ranks: int, payload: int) -> None:
        try:
            found = scan(directory, num_ranks, payload, _tell_slow_search)
        except OSError as error:
            self._found.put(([], 0, str(error)))
            return
        blocks = found.blocks
        for begin in range(0, max(1, len(blocks)), _FOUND_PER_STEP):
            num_wrong = 0 if begin else found.num_wrong
            self._found.put((blocks[begin : begin + _FOUND_PER_STEP], num_wrong, ""))
        self._found.put(None)

    @property
    def has_orders(self) -> bool:
        """Whether the next step has something to do."""
        return self.index.has_orders or not self._found.empty()

    def poll(self) -> None:
        """Takes over some of the blocks that were found, and looks for a disk that hangs."""
        if not self._found.empty():
            if (found := self._found.get()) is None:
                self.index.end_search()
            else:
                blocks, num_wrong, error = found
                self.index.found(blocks, num_wrong)
                if error:
                    self.index.turn_off(error)
        self.index.check_time()

    def take_orders(self) -> list[Order]:
        """Returns the orders of the step that is made next."""
        self.poll()
        return self.index.take_orders()

    def add_to(self, report: StepReport) -> None:
        """Adds the changes since the last step."""
        report.disk_cache = self.index.take_change()
        counts = self.index.take_counts()
        if counts.off:
            _log.warning("kv_store.disk_dir is not used any more: %s", counts.off)
        report.num_wrong_files, report.disk_failed = counts.num_wrong, bool(counts.off)


def _tell_slow_search(num_found: int) -> None:
    _log.warning(
        "the search for KV blocks of an earlier worker in kv_store.disk_dir has found %d and goes "
        "on; nothing is loaded or written there until it ends",
        num_found,
    )


def make_rank_disk(
    extra: Mapping[str, Any], rank: int, worker: OffloadingWorker, layout: str
) -> RankDisk | None:
    """Returns the disk of one rank; None if the tier is off.

    Args:
        extra: kv_connector_extra_config.
        rank: Tensor-parallel rank.
        worker: vLLM's copier in the rank, with its host memory.
        layout: Arrangement of the bytes of a block (paged_cache.page_layout).
    """
    if (options := extra.get(DISK)) is None:
        return None
    directory = rank_directory(Path(options["directory"]), rank)
    # The arrangement is known only now: the worker's directory was chosen without it. Files of
    # another one are wrong files.
    namespace = hashlib.sha256(bytes.fromhex(options["namespace"]) + layout.encode()).digest()
    return RankDisk(directory, namespace, rank, host_pages(host_layers(worker)))
