"""The interface between a worker and its engine.

An engine runs requests in steps. A worker submits and aborts; `next_step` gives everything one step
produced as one list, so that a step costs one message however many requests it served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from baton.kvtransfer.layout import KvLayout
from baton.v1 import common_pb2


class EngineDead(Exception):
    """The engine cannot go on; the worker ends with it. The message says why."""


class RequestRejected(Exception):
    """The engine does not take this request; others are not affected. The message says why."""


class NoProfiler(Exception):
    """The engine cannot record what it computes. The message says why."""


class Finish(Enum):
    """Why the engine stopped a request."""

    STOP = "stop"
    LENGTH = "length"
    # A prefill-only request has its first token and would go on.
    CUT = "cut"
    ABORTED = "aborted"
    ERROR = "error"
    # The handoff leaves out what the prefix cache no longer has: nothing was computed.
    PREFIX_GONE = "prefix gone"


@dataclass(frozen=True, slots=True)
class SendHandoff:
    """Push this request's KV blocks into the sender's staging as they are computed.

    Attributes:
        handoff_id: 16 bytes.
        offset: of the handoff's bytes in the shared segment (LocalSendOpened).
        num_tokens: of the prompt to hand over, from the first.
        skip_tokens: of these, from the first, that are left out; whole blocks.
    """

    handoff_id: bytes
    offset: int
    num_tokens: int
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReceiveHandoff:
    """Begin with KV blocks that another worker pushed.

    Attributes:
        handoff_id: 16 bytes.
        num_tokens: of the prompt, and of the known tokens after it, that it holds, from the first.
        timeout_s: how long to wait for the commit before computing the prompt here.
        skip_tokens: of num_tokens, from the first, that the handoff leaves out; whole blocks. Where
            the prefix cache does not have them the request ends with Finish.PREFIX_GONE.
    """

    handoff_id: bytes
    num_tokens: int
    timeout_s: float
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as an engine runs it.

    Attributes:
        request_id: unique among this engine's live requests.
        prompt_token_ids: the original prompt, whatever is known beyond it.
        sampling: the client's parameters, counted over the whole output: an engine takes the known
            tokens off the limits itself.
        known_token_ids: output tokens that exist already; generation continues after them, in the
            state an undisturbed run would be in, and they are not reported again.
        known_text_chars: characters (code points) of text that went with them; not reported again.
        prefill_only: report the first token and stop (Finish.CUT), unless it ends the request.
        priority: smaller first.
        adapter: name of the LoRA adapter to compute it with; empty: none.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: common_pb2.SamplingParams
    known_token_ids: Sequence[int] = ()
    known_text_chars: int = 0
    prefill_only: bool = False
    priority: int = 0
    send: SendHandoff | None = None
    receive: ReceiveHandoff | None = None
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Logprob:
    token_id: int
    logprob: float
    rank: int
    text: str


@dataclass(slots=True)
class EngineOutput:
    """What one step gave one request.

    Attributes:
        token_ids: new tokens, known ones left out.
        text: text that became final in this step; may lag behind the tokens.
        logprobs: one tuple per token of token_ids, the chosen token first, when asked for.
        finish: None while the request goes on.
        stop: the stop string that matched, or the decimal id of the stop token.
        prompt_logprobs: with the output that finishes or cuts the prompt, when asked for.
        queue_s: with the first output: from submit until the engine first ran it.
        run_s: with the first output: from then until now.
        handoff_wait_s: with the first output: how much of queue_s passed waiting for the commit.
        num_cached_tokens: with the first output: prompt tokens from this engine's prefix cache.
        num_handoff_tokens: with the first output: prompt tokens loaded from the handoff.
        error: with Finish.ERROR: why.
    """

    request_id: str
    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[Sequence[Logprob]] = ()
    finish: Finish | None = None
    stop: str = ""
    prompt_logprobs: Sequence[Sequence[Logprob]] = ()
    queue_s: float | None = None
    run_s: float | None = None
    handoff_wait_s: float | None = None
    num_cached_tokens: int = 0
    num_handoff_tokens: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepSample:
    """What one step cost, for the latency model.

    Attributes:
        num_kv_tokens: that the decoded requests attend to, in sum.
        prefill_token_squares: end^2 - done^2 in sum over the chunks (LatencyModel.step_s).
    """

    num_prefill_tokens: int
    num_decodes: int
    num_kv_tokens: int
    duration_s: float
    prefill_token_squares: int = 0


@dataclass(frozen=True, slots=True)
class CacheChange:
    """What changed in an engine's prefix cache, by block hash (runtime/block_hashes.py).

    Engines that hash otherwise hash again what they report. `cleared` came first, then what was
    removed, then what was stored; a block is stored after the one before it and removed before it.

    Attributes:
        stored: may be named by requests from now on; each holds one full block of tokens.
        removed: no longer there.
        cleared: nothing that was reported before is there.
    """

    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    cleared: bool = False


@dataclass(slots=True)
class EngineStep:
    """Everything one engine step produced.

    Attributes:
        outputs: may be empty.
        cache: what changed since the last step; None for nothing, and from engines that do not say.
    """

    outputs: list[EngineOutput] = field(default_factory=list)
    cache: CacheChange | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for load reports.

    Attributes:
        num_steps: counts steps; standing still while requests run means a wedge.
        samples: steps since the last snapshot, at most a few hundred.
    """

    num_steps: int
    num_running: int
    num_waiting: int
    kv_tokens_used: int
    kv_tokens_total: int
    prefill_tokens_waiting: int
    samples: Sequence[StepSample] = ()


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, known once it has started.

    Attributes:
        layout: of its KV cache; what handoffs to and from it look like.
        max_num_batched_tokens: tokens of one step at most: the prefill chunk.
        supports_forced_tokens: whether known tokens can be replayed in exact sampling state.
        keeps_prefixes: whether computed blocks stay for equal prefixes.
        weights_s, kv_s: of its start: until the model was loaded, and allocating its cache.
    """

    engine: str
    version: str
    device: str
    model: common_pb2.ModelDescription
    layout: KvLayout
    kv_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    supports_forced_tokens: bool
    keeps_prefixes: bool
    weights_s: float = 0.0
    kv_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank computed: JSON in Chrome's trace event format."""

    rank: int
    path: Path


class Engine(Protocol):
    """One engine process group. All calls come from one event loop.

    Ids passed to `submit` stay live until an output with `finish` or `abort`; after
    `abort` returns nothing more is reported for them. An engine never touches the network: a
    handoff's bytes go through the staging of the worker's transfer service.
    """

    async def start(self) -> EngineInfo:
        """Loads the model. Raises EngineDead when it cannot."""
        ...

    async def submit(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestRejected, EngineDead."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Forgets requests and frees what they hold; unknown ids are ignored."""
        ...

    async def next_step(self) -> EngineStep:
        """Waits for the next step's outputs. One caller at a time. Raises EngineDead."""
        ...

    def load(self) -> EngineLoad:
        """What the engine is doing now."""
        ...

    async def start_profile(self) -> None:
        """Records what every rank computes from now on. Raises NoProfiler, EngineDead."""
        ...

    async def stop_profile(self) -> Sequence[Trace]:
        """Ends the recording; steps may wait while it is written. Raises EngineDead.

        Returns:
            A trace per rank, the caller's to remove; none when nothing was recorded.
        """
        ...

    async def stop(self) -> None:
        """Ends the engine's processes; idempotent."""
        ...
