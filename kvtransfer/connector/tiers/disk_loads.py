"""The loads from disk of one waiting prompt: what it has asked for, and how long it waits."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from baton.kvtransfer.connector.tiers.host_memory import HostBlocks
from baton.kvtransfer.disk.index import TIMEOUT_S

# Most times that one prompt loads a block again, which host memory has evicted before the prompt
# could run.
_MOST_REPEATS = 2


class DiskLoads:
    """Loads a prompt's blocks from disk to host memory, as far as there are places.

    Attributes:
        keys: The blocks that were loaded, or are being loaded.
    """

    def __init__(self) -> None:
        self.keys: set[OffloadKey] = set()
        self._num_repeats = 0
        # When the prompt waits no longer for places; None while it has some.
        self._deadline: float | None = None

    def load(
        self, blocks: HostBlocks, keys: Sequence[OffloadKey], req_context: ReqContext, now: float
    ) -> bool:
        """Begins to load the next blocks.

        Args:
            blocks: Host memory, with the disk below it.
            keys: The blocks that the prompt needs, in their order.
            req_context: Belongs to the prompt's request.
            now: Current time.monotonic(), in seconds.

        Returns:
            Whether the prompt must wait and ask again, because loads of others take all places. It
            waits for as long as a disk may hang; then it computes the blocks.
        """
        if self._num_repeats > _MOST_REPEATS:
            return False
        loaded = blocks.load_from_disk(keys, req_context)
        if loaded is None:
            if self._deadline is None:
                self._deadline = now + TIMEOUT_S
            return now < self._deadline
        self._deadline = None
        self._num_repeats += not loaded.isdisjoint(self.keys)
        self.keys |= loaded
        return False
