"""The interface between a worker and its engine.

An engine runs requests in steps. A worker submits and aborts requests. `next_step` returns the
outputs of one step as one list, so that a step costs one message, however many requests it served.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol

from baton.kvtransfer.block_changes import CacheChange
from baton.kvtransfer.handoff_orders import ReceiveHandoff, SendHandoff
from baton.kvtransfer.layout import KvLayout
from baton.runtime.prompts.prompt_images import end_of_images
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import cluster_pb2, common_pb2, inference_pb2


class EngineDead(Exception):
    """The engine cannot continue, and the worker ends with it. The message gives the reason."""


class RequestRejected(Exception):
    """The engine refuses this request only, and the message gives the reason."""


class NoProfiler(Exception):
    """The engine cannot record a profile. The message gives the reason."""


class Finish(Enum):
    """Why the engine stopped a request."""

    STOP = "stop"
    LENGTH = "length"
    # A prefill-only request has its first token; its decode runs on another worker.
    CUT = "cut"
    ABORTED = "aborted"
    ERROR = "error"
    # The engine has computed nothing, because KV blocks are missing: the blocks that the handoff
    # leaves out, the prompt of a request with `only_cached`, or the blocks of images whose files
    # the engine does not have.
    PREFIX_GONE = "prefix gone"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as an engine runs it.

    Attributes:
        engine_request_id: Unique among the engine's live requests.
        prompt_token_ids: The original prompt, without known output tokens.
        sampling: The client's parameters. Its limits count the whole output; the engine subtracts
            the known tokens.
        known_token_ids: Output tokens that exist already and are not reported again. Generation
            continues after them, in the state of an undisturbed run.
        known_text_chars: Characters (code points) of text that were sent with the known tokens.
        prefill_only: Report the first token and stop with Finish.CUT, unless the token ends the
            request.
        priority: The engine runs a request with a smaller number first.
        send: Handoff to send; None: none.
        receive: Handoff to load; None: none.
        adapter: Name of the LoRA adapter; empty: none.
        cache_salt: The request finds only KV blocks of requests with the same salt; empty: none.
        only_cached: Whether the request ends with Finish.PREFIX_GONE unless the prefix cache, host
            memory and the disk hold all prompt tokens but the last one. Its send is kept then, and
            the caller may shrink it for the next request.
        due_in_s: Seconds until the first token is due; infinite without a TTFT target.
        itl_s: ITL target that the client named, in seconds; None: the engine's target applies.
        images: Images of the prompt, in order.
        chat: The chat with the images' files; None: the prompt has no images, or the engine gets
            their KV cache. If it would have to compute an image that it does not have, the request
            ends with Finish.PREFIX_GONE, or with Finish.ABORTED after its first output.
    """

    engine_request_id: str
    prompt_token_ids: Sequence[int]
    sampling: common_pb2.SamplingParams
    known_token_ids: Sequence[int] = ()
    known_text_chars: int = 0
    prefill_only: bool = False
    priority: int = 0
    send: SendHandoff | None = None
    receive: ReceiveHandoff | None = None
    adapter: str = ""
    cache_salt: str = ""
    only_cached: bool = False
    due_in_s: float = math.inf
    itl_s: float | None = None
    images: Sequence[common_pb2.PromptImage] = ()
    chat: inference_pb2.ChatPrompt | None = None

    @property
    def returns_prompt_logprobs(self) -> bool:
        """Whether the engine returns prompt log probabilities, and so computes the whole prompt.

        If another worker has computed the whole prompt, that worker has returned them. A request
        with known tokens and without such a handoff returns them: the worker that returned the
        tokens may have been lost before the request's end.
        """
        return self.sampling.HasField("prompt_logprobs") and not self.loads_whole_prompt

    @property
    def loads_whole_prompt(self) -> bool:
        """Whether the request loads a handoff that is not a fetch."""
        return self.receive is not None and not self.receive.is_fetch

    @property
    def num_needed_tokens(self) -> int:
        """Prompt tokens, from the first, whose KV cache the engine cannot compute itself."""
        return end_of_images(self.images) if self.chat is None else 0


def cached_prefix_request(
    engine_request_id: str,
    token_ids: Sequence[int],
    *,
    send: SendHandoff | None = None,
    priority: int = 0,
    adapter: str = "",
    cache_salt: str = "",
    images: Sequence[common_pb2.PromptImage] = (),
    due_in_s: float = math.inf,
) -> EngineRequest:
    """Returns a request that loads a prefix of a prompt into the prefix cache and may send it.

    It ends with Finish.CUT, or with Finish.PREFIX_GONE if the engine lacks a block of the prefix.

    Args:
        engine_request_id: See EngineRequest, as for the following arguments.
        token_ids: The tokens of the prefix, whole blocks.
        send: Handoff of the prefix; None: none.
        priority: See EngineRequest.
        adapter: See EngineRequest.
        cache_salt: See EngineRequest.
        images: Images of the prompt.
        due_in_s: See EngineRequest.
    """
    return EngineRequest(
        engine_request_id=engine_request_id,
        # The engine computes one token after the prefix; its value does not matter.
        prompt_token_ids=[*token_ids, token_ids[0]],
        sampling=common_pb2.SamplingParams(max_tokens=2, ignore_eos=True),
        prefill_only=True,
        priority=priority,
        send=send,
        adapter=adapter,
        cache_salt=cache_salt,
        only_cached=True,
        due_in_s=due_in_s,
        images=images,
    )


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """The prompt of a chat with images.

    Attributes:
        token_ids: Token IDs, with the placeholders of the images.
        images: Where the images stand, in order.
    """

    token_ids: Sequence[int]
    images: Sequence[common_pb2.PromptImage]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log probability of one candidate token."""

    token_id: int
    logprob: float
    rank: int
    text: str


@dataclass(slots=True)
class EngineOutput:
    """Output of one step for one request.

    Attributes:
        engine_request_id: ID of the request.
        token_ids: New tokens, without known ones.
        text: Text that became final in this step; it may lag behind the tokens.
        logprobs: For each token of token_ids the candidates, the chosen token first; empty unless
            requested.
        finish: Why the request ended; None while it continues.
        stop: The stop string that matched, or the decimal ID of the stop token.
        prompt_logprobs: Only in the first output: for each prompt token its candidates, the token
            itself first, and none for the first token. Empty unless the request returns them.
        timings: Only in the first output: durations of the request's stages since its submission.
            The engine leaves the numbers of tokens in this message unset.
        num_cached_tokens: Only in the first output: prompt tokens from this engine's prefix cache.
        num_host_tokens: Only in the first output: prompt tokens loaded from this worker's host
            memory (kv_store.host_bytes).
        num_disk_tokens: Only in the first output: prompt tokens loaded from this worker's disk
            (kv_store.disk_dir).
        num_handoff_tokens: Only in the first output: prompt tokens loaded from the handoff that the
            request received.
        num_held_tokens: Only with Finish.PREFIX_GONE of a request with `only_cached`: prompt
            tokens, from the first, that this engine holds; 0 if it has filled a part of the send.
        error: The reason, with Finish.ERROR.
    """

    engine_request_id: str
    token_ids: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[Sequence[Logprob]] = ()
    finish: Finish | None = None
    stop: str = ""
    prompt_logprobs: Sequence[Sequence[Logprob]] = ()
    timings: cluster_pb2.StageTimings | None = None
    num_cached_tokens: int = 0
    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_handoff_tokens: int = 0
    num_held_tokens: int = 0
    error: str = ""

    @property
    def has_begun(self) -> bool:
        """Whether this is the first output, which has the timings, or the last one."""
        return self.timings is not None or self.finish is not None


@dataclass(frozen=True, slots=True)
class StepSample:
    """Cost of one step, for the latency model.

    Attributes:
        num_prefill_tokens: Prompt tokens that the step computed.
        num_decodes: Requests for which the step computed one output token.
        num_kv_tokens: Sum of the tokens that these requests attend to.
        duration_s: Duration of the step in seconds.
        prefill_token_squares: Sum of end^2 - done^2 over the prefill chunks (LatencyModel.step_s).
    """

    num_prefill_tokens: int
    num_decodes: int
    num_kv_tokens: int
    duration_s: float
    prefill_token_squares: int = 0


@dataclass(slots=True)
class EngineStep:
    """Everything that one engine step produced.

    Attributes:
        outputs: Outputs of the step's requests; may be empty.
        cache: Change of the prefix cache since the last step; None for no change.
        host_cache: Change of the blocks that host memory holds; None for no change. A prompt finds
            them after the blocks that it finds in the prefix cache. A block may be in both. A
            block in host memory may lack the block before it.
        disk_cache: Change of the blocks on disk; None for no change. They are found like blocks in
            host memory.
        num_wrong_files: Files of the disk tier that were wrong, so that their blocks were not used.
        disk_failed: True once, when the disk tier has failed and is not used any more.
    """

    outputs: list[EngineOutput] = field(default_factory=list)
    cache: CacheChange | None = None
    host_cache: CacheChange | None = None
    disk_cache: CacheChange | None = None
    num_wrong_files: int = 0
    disk_failed: bool = False


@dataclass(frozen=True, slots=True)
class DroppedBlocks:
    """KV blocks that an engine has deleted, by tier.

    Attributes:
        device: Blocks of the prefix cache.
        host: Blocks in host memory.
        disk: Blocks on disk.
        has_files_left: True if the disk has failed, so that files may be left.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    has_files_left: bool = False


@dataclass(frozen=True, slots=True)
class TierLoads:
    """Loads of KV blocks from one tier.

    Attributes:
        num_bytes: Bytes of all ranks; ranks that hold the same keys and values count once.
        seconds: Time in which the ranks loaded them, all at the same time.
    """

    num_bytes: int = 0
    seconds: float = 0.0


NO_LOADS = TierLoads()


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for load reports.

    Attributes:
        num_steps: Number of steps since the start. It does not grow while a stuck engine has
            requests.
        num_running: Requests that hold KV blocks.
        num_waiting: Requests that wait for a place or for their handoff.
        kv_tokens_used: KV tokens in use.
        kv_tokens_total: Size of the KV cache in tokens.
        prefill_tokens_waiting: Prompt tokens that are still to be computed.
        samples: Costs of the steps since the last snapshot, at most a few hundred.
        host_loads: Loads from host memory to the device since the last snapshot.
        disk_loads: Loads from disk to host memory since the last snapshot.
    """

    num_steps: int
    num_running: int
    num_waiting: int
    kv_tokens_used: int
    kv_tokens_total: int
    prefill_tokens_waiting: int
    samples: Sequence[StepSample] = ()
    host_loads: TierLoads = NO_LOADS
    disk_loads: TierLoads = NO_LOADS


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of a started engine.

    Attributes:
        engine: Kind of engine, for example "vllm".
        version: Version of the engine.
        device: Device type, for example "cuda".
        device_name: Model of the device, for example "NVIDIA H100 80GB HBM3".
        model: The model and its limits.
        layout: Layout of the KV cache, which handoffs use.
        kv_tokens: Size of the KV cache in tokens.
        host_kv_tokens: Size of the KV store in host memory in tokens; 0: none.
        disk_kv_tokens: Size of the KV store on disk in tokens; 0: none.
        disk_bytes_per_s: Speed of loads from disk in bytes per second until a load is measured; 0:
            unknown.
        max_num_seqs: Most requests of one step.
        max_num_batched_tokens: Most tokens of one step, which is the size of a prefill chunk.
        supports_forced_tokens: Whether known tokens can be replayed with the exact sampling state.
        keeps_prefixes: Whether computed blocks stay cached for prompts with the same prefix.
        weights_s: Seconds from the start until the model was loaded.
        kv_s: Seconds that allocating the KV cache took.
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
    host_kv_tokens: int = 0
    disk_kv_tokens: int = 0
    disk_bytes_per_s: int = 0
    device_name: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Profile of one rank: JSON in Chrome's trace event format."""

    rank: int
    path: Path


class Engine(Protocol):
    """One engine process group. All calls come from one event loop.

    A submitted request ID stays live until an output with `finish` or until `abort`. After `abort`
    returns, the engine reports nothing more for it. An engine never uses the network: the bytes of
    a handoff pass through the staging of the worker's transfer service.
    """

    async def start(self) -> EngineInfo:
        """Loads the model. Raises EngineDead if it fails."""
        ...

    async def render(self, chat: inference_pb2.ChatPrompt, max_pixels: int) -> RenderedPrompt:
        """Renders a chat with images, as `submit` will.

        Args:
            chat: The chat.
            max_pixels: Limit of the images' decoded pixels, together.

        Raises:
            InvalidArgument: The model takes no images, or an image is wrong.
            EngineDead: The engine has failed.
        """
        ...

    async def submit(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestRejected, EngineDead."""
        ...

    async def abort(self, engine_request_ids: Sequence[str]) -> None:
        """Aborts requests and frees their resources; ignores unknown IDs."""
        ...

    async def next_step(self) -> EngineStep:
        """Waits for the next step's outputs. Only one caller at a time. Raises EngineDead."""
        ...

    def take_load(self) -> EngineLoad:
        """Returns the engine's load now, and what it measured since the last call."""
        ...

    def set_step_targets(self, targets: StepTargets) -> None:
        """Sets the targets of the steps from the next one on; may be called before `start`."""
        ...

    async def drop_cache(
        self, cache_salt: str | None, block_hashes: Collection[int] | None = None
    ) -> DroppedBlocks:
        """Deletes KV blocks from every tier, and overwrites their bytes. Raises EngineDead.

        Running requests keep their blocks until they end, and may store what they compute later.

        Args:
            cache_salt: Delete only blocks of requests with this salt (EngineRequest.cache_salt);
                None: all blocks.
            block_hashes: Delete only blocks that also have one of these hashes (CacheChange); None:
                with any hash.
        """
        ...

    async def start_profile(self) -> None:
        """Starts recording a profile in every rank. Raises NoProfiler, EngineDead."""
        ...

    async def stop_profile(self) -> Sequence[Trace]:
        """Stops the recording; steps may wait while the profile is written. Raises EngineDead.

        Returns:
            One trace per rank, which the caller must remove; empty if nothing was recorded.
        """
        ...

    async def stop(self) -> None:
        """Ends the engine's processes. Idempotent."""
        ...
