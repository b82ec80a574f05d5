"""The prefix caches of a simulated worker: on its device, and in its host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.runtime.prompts.block_hashes import block_hashes, root_of
from baton.simulator.parts import PrefixCache, Shape, SimulatedRequest
from baton.v1 import cluster_pb2


class WorkerCaches:
    """Says what a worker holds of a prompt, and keeps the blocks that it has computed.

    Args:
        shape: Sizes of the caches, and the speed of loads from host memory.
        report: Takes the blocks that a cache has stored and evicted.
    """

    def __init__(self, shape: Shape, report: Callable[[cluster_pb2.CacheEvents], object]) -> None:
        self._shape, self._report = shape, report
        # Tokens loaded from host memory since the last report.
        self._num_loaded = 0
        self._device = self._host = None
        if shape.prefix_caching:
            self._device = PrefixCache(shape.kv_tokens, shape.block_size_tokens)
        if shape.host_kv_tokens:
            self._host = PrefixCache(
                shape.host_kv_tokens, shape.block_size_tokens, cluster_pb2.CACHE_TIER_HOST
            )

    def hashes(
        self, spec: cluster_pb2.RequestSpec | cluster_pb2.SendPrefixCommand
    ) -> Sequence[int]:
        """Returns the hashes of a prompt's blocks; empty without a prefix cache."""
        if self._device is None:
            return ()
        root = root_of(spec.adapter, spec.cache_salt)
        return block_hashes(spec.prompt_token_ids, self._shape.block_size_tokens, root)

    def held(self, request: SimulatedRequest) -> tuple[int, int]:
        """Returns the prompt tokens on the device, and those behind them in host memory.

        The last token is always computed.
        """
        if self._device is None:
            return 0, 0
        num_cached = min(self._device.num_cached(request.hashes), request.num_tokens - 1)
        if self._host is None:
            return num_cached, 0
        num_host = self._host.num_cached(request.hashes, num_cached)
        return num_cached, min(num_host, request.num_tokens - 1 - num_cached)

    def take_held(self, request: SimulatedRequest) -> None:
        """Counts what the caches hold of a prompt as computed."""
        request.num_cached, request.num_host = self.held(request)
        request.num_fetched = 0
        request.use_held()

    def expect_more(self, request: SimulatedRequest) -> None:
        """Counts the blocks that the device has got since a waiting prompt was looked up.

        They shorten the prompt, by whose length the next step's prompts are chosen.
        """
        if self._device is None:
            return
        num_more = self._device.num_expected(request.hashes, request.num_held)
        num_more = min(num_more, request.num_tokens - 1 - request.num_held)
        if num_more:
            request.num_cached += num_more
            request.use_held()

    def take_held_at_start(self, request: SimulatedRequest) -> None:
        """Looks a prompt up when its computation starts, as vLLM does.

        Loaded and fetched blocks belong to the prompt since then. Blocks of the device may have
        been evicted while the prompt waited. If there is a KV store in host memory, it is assumed
        to have loaded them again.
        """
        if self._device is None:
            return
        num_cached = min(self._device.num_cached(request.hashes), request.num_tokens - 1)
        if self._host is None and num_cached < request.num_cached and not request.num_fetched:
            request.num_cached = num_cached
            request.use_held()

    def keep(self, request: SimulatedRequest) -> None:
        """Puts the computed blocks of a request into the caches."""
        for cache in (self._device, self._host):
            if cache is not None:
                changes = cache.keep(request.hashes, request.num_computed)
                if changes is not None:
                    self._report(changes)

    def load_s(self, num_tokens: int) -> float:
        """Returns the seconds that a load from host memory takes, and counts the load."""
        self._num_loaded += num_tokens
        return self._shape.host_load_s(num_tokens)

    def take_loads(self) -> cluster_pb2.TierLoads:
        """Returns the loads from host memory since the last call."""
        num_loaded, self._num_loaded = self._num_loaded, 0
        return cluster_pb2.TierLoads(
            num_bytes=round(num_loaded * self._shape.kv_bytes_per_token),
            duration_us=round(self._shape.host_load_s(num_loaded) * 1e6),
        )
