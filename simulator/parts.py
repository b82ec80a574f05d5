"""Data types of a simulated worker: its shape, requests, runs of steps, and prefix cache."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import StreamPace
from baton.v1 import cluster_pb2


@dataclass(frozen=True, slots=True)
class Shape:
    """Size and speed of a simulated worker.

    Attributes:
        model: Step times.
        announced_kv_tokens: KV cache size that the worker announces; None: the true size. 0 means
            no limit, for systems whose dispatcher ignores the size.
        chunked: Whether a prompt may be computed in several steps (chunked prefill).
        follows_step_targets: Whether step targets limit the steps, as in Baton's scheduler
            (runtime/steps/step_budget.py). Otherwise prompts are computed first come, first served,
            up to `max_num_batched_tokens` per step, as in vLLM.
        join_reserve_share: Share of the KV cache that must stay free when a request joins the
            batch.
        swaps: Whether a preempted request keeps its KV cache (in CPU memory); if not, it is
            computed again.
        handoff_s, handoff_per_token_s: Duration of the transfer of a prompt's KV cache.
        handoff_stalls: Whether the decode worker makes no steps during a handoff.
        delay_s: Delay of every message between worker and coordinator.
        host_kv_tokens: Tokens that the KV store in host memory holds; 0: none.
        kv_bytes_per_token: Bytes of KV cache per token.
        host_bytes_per_s: Bytes per second that a load from host memory moves.
        network_bytes_per_s: Bytes per second that a worker sends of the prefixes that others fetch.
        flush_s: Longest time for which tokens in the middle of an output are held back, so that
            several steps are simulated as one event.
    """

    model: LatencyModel
    kv_tokens: int = 65536
    announced_kv_tokens: int | None = None
    block_size_tokens: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 131072
    chunked: bool = True
    follows_step_targets: bool = field(kw_only=True)
    join_reserve_share: float = 0.0
    swaps: bool = False
    handoff_s: float = 0.002
    handoff_per_token_s: float = 0.0
    handoff_stalls: bool = False
    delay_s: float = 0.001
    prefix_caching: bool = False
    flush_s: float = 2.0
    host_kv_tokens: int = 0
    kv_bytes_per_token: float = 64.0
    host_bytes_per_s: float = 10e9
    network_bytes_per_s: float = 10e9

    def host_load_s(self, num_tokens: int) -> float:
        """Returns the seconds that a load of these tokens from host memory takes."""
        return num_tokens * self.kv_bytes_per_token / self.host_bytes_per_s


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request on the worker.

    While a request decodes, `num_tokens` and `num_outputs_left` keep the values from the moment
    when the request joined the batch; the worker counts the steps since then.

    Attributes:
        order: Order of arrival at the worker.
        num_output_tokens: Length of the whole output.
        num_uncomputed: Tokens to compute before the next output token.
        num_computed: Tokens whose KV cache is computed.
        num_tokens: Tokens that the KV cache holds once the request runs.
        num_outputs_left: Output tokens still to be made.
        offset: Position of the next output token that is sent to the coordinator.
        num_prompt_tokens: Tokens of the prompt.
        hashes: Hashes of the prompt's blocks.
        num_cached: Prompt tokens that came from the prefix cache.
        num_host: Prompt tokens that were loaded from host memory.
        num_fetched: Prompt tokens that were fetched from another worker.
        fetches: Prefix that it fetches; None: it fetches none, or waits for the fetch of another
            request.
        sends: Where it sends its prompt, of which it computes only the last token; None: it is a
            client's request.
        is_handoff: Whether the KV cache comes from a prefill worker.
        joined_at_step: Step of the worker at which the request joined the decode batch.
        num_sent: Output tokens sent to the coordinator since the request joined.
        first_sent: Whether any output token was sent.
        ended: Whether the request has finished or was cancelled.
        last_at: When the latest token was made before the request joined the batch, here or
            elsewhere; nan before the first token.
        arrived_at: When the request arrived at the worker.
        due_at: When its first token is due; infinite without a TTFT target.
        itl_s: ITL target that the client named; None: the worker's applies.
        pace: Compares its tokens since it joined the batch with the ITL target.
    """

    request_id: str
    attempt: int
    priority: int
    order: int
    num_output_tokens: int
    num_uncomputed: int
    num_computed: int
    num_tokens: int
    num_outputs_left: int
    offset: int
    num_prompt_tokens: int
    hashes: Sequence[int]
    num_cached: int = 0
    num_host: int = 0
    num_fetched: int = 0
    fetches: cluster_pb2.FetchPlan | None = None
    sends: cluster_pb2.HandoffPlan | None = None
    is_handoff: bool = False
    joined_at_step: int = -1
    num_sent: int = 0
    first_sent: bool = False
    ended: bool = False
    last_at: float = math.nan
    arrived_at: float = 0.0
    due_at: float = math.inf
    itl_s: float | None = None
    pace: StreamPace | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt

    @property
    def num_held(self) -> int:
        """Prompt tokens that were not computed here, apart from those of a handoff."""
        return self.num_cached + self.num_host + self.num_fetched

    @property
    def has_begun(self) -> bool:
        """Whether any token of its prompt was computed here, or came by a handoff."""
        return self.num_computed > self.num_held

    def use_held(self) -> None:
        """Counts the held prompt tokens as computed, and all others as still to compute."""
        self.num_computed = self.num_held
        self.num_uncomputed = self.num_tokens - self.num_held


@dataclass(slots=True)
class Run:
    """Consecutive steps that decode the same batch.

    Attributes:
        began_at: Start of the first step.
        first_s: Duration of the first step.
        growth_s: How much longer each step is than the one before it.
    """

    began_at: float
    num_steps: int
    first_s: float
    growth_s: float

    def lasts_s(self, num_steps: int) -> float:
        return num_steps * self.first_s + self.growth_s * num_steps * (num_steps - 1) / 2

    def done_at(self, when: float) -> int:
        """Returns how many steps have ended at time `when`."""
        passed = when - self.began_at
        if passed <= 0:
            return 0
        if self.growth_s <= 0:
            number = passed / self.first_s
        else:
            half = self.first_s - self.growth_s / 2
            number = (math.sqrt(half * half + 2 * self.growth_s * passed) - half) / self.growth_s
        return min(self.num_steps, int(number + 1e-9))


class PrefixCache:
    """KV blocks of one tier that stay after their requests; the least recently used leave first.

    The last block of a prompt leaves before its other blocks, so that the rest is still a prefix.

    Args:
        num_tokens: Size in tokens.
        block_size_tokens: Tokens per block.
        tier: The tier, for the reports to the coordinator.
    """

    def __init__(
        self,
        num_tokens: int,
        block_size_tokens: int,
        tier: cluster_pb2.CacheTier.ValueType = cluster_pb2.CACHE_TIER_UNSPECIFIED,
    ) -> None:
        self._num_blocks = num_tokens // block_size_tokens
        self._block_size_tokens, self._tier = block_size_tokens, tier
        # Block hashes, the least recently used first.
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached(self, hashes: Sequence[int], begin_tokens: int = 0) -> int:
        """Returns how many prompt tokens are held from `begin_tokens` on, without a gap.

        The blocks up to there, as far as they are held, count as just used.
        """
        num_cached = self.num_expected(hashes, begin_tokens)
        end = begin_tokens // self._block_size_tokens + num_cached // self._block_size_tokens
        for one in reversed(hashes[:end]):
            if one in self._blocks:
                self._blocks.move_to_end(one)
        return num_cached

    def num_expected(self, hashes: Sequence[int], begin_tokens: int) -> int:
        """Like `num_cached`, but the blocks do not count as used."""
        begin = end = begin_tokens // self._block_size_tokens
        while end < len(hashes) and hashes[end] in self._blocks:
            end += 1
        return (end - begin) * self._block_size_tokens

    def keep(self, hashes: Sequence[int], num_tokens: int) -> cluster_pb2.CacheEvents | None:
        """Stores the full blocks of the first `num_tokens` tokens.

        Returns:
            The blocks that were stored and evicted; None if there are none.
        """
        blocks, kept = self._blocks, hashes[: num_tokens // self._block_size_tokens]
        stored = array("Q", (one for one in kept if one not in blocks))
        for one in reversed(kept):
            blocks[one] = None
            blocks.move_to_end(one)
        removed = array("Q")
        while len(blocks) > self._num_blocks:
            removed.append(blocks.popitem(last=False)[0])
        if not stored and not removed:
            return None
        # Only the first blocks of a prompt that is larger than the tier stay.
        gone = set(removed)
        return cluster_pb2.CacheEvents(
            stored=[one for one in stored if one not in gone], removed=removed, tier=self._tier
        )
