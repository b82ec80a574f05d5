"""The simulated engine: real scheduling, real handoffs and real protocols, without a model.

Steps take the time that the latency model predicts. Tokens are a hash chain over all tokens before
them (`expected_tokens` in sim_tokens.py), and KV bytes carry the prompt's digest, so lost, repeated
or foreign data is detected. An answer ends at a length that follows from its prompt
(`mean_output_tokens`), or is written in the configuration (`answers`). The engine reads only the
sampling parameters that end an output: max_tokens, min_tokens, ignore_eos, stop, stop_token_ids. It
needs neither torch nor a model's weights, only the model's tokenizer.json.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import tempfile
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from time import monotonic

from baton.engine.base import (
    DroppedBlocks,
    EngineDead,
    EngineInfo,
    EngineLoad,
    EngineOutput,
    EngineRequest,
    EngineStep,
    Finish,
    RenderedPrompt,
    RequestRejected,
    StepSample,
    TierLoads,
    Trace,
)
from baton.engine.sim_answers import WrittenAnswers
from baton.engine.sim_blocks import BlockPool
from baton.engine.sim_handoff import HandoffPort, WrongHandoff
from baton.engine.sim_host_tier import HostTier
from baton.engine.sim_images import ImageRenderer
from baton.engine.sim_sampling import Sampler
from baton.engine.sim_scheduler import LiveRequest, Scheduler, Work
from baton.engine.sim_text import OutputText
from baton.engine.sim_tokens import TokenChain, Vocabulary
from baton.engine.sim_trace import StepTrace
from baton.kvtransfer.errors import ServiceGone
from baton.kvtransfer.handoff_orders import ReceiveHandoff
from baton.kvtransfer.layout import KvLayout
from baton.runtime.config import SimulatedConfig
from baton.runtime.errors import InvalidArgument
from baton.runtime.prompts.prompt_images import keyed_tokens
from baton.runtime.steps.latency import LatencyModel, PrefillChunk
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import cluster_pb2, common_pb2, inference_pb2

_VERSION = "1"
_MAX_SAMPLES = 256
# Most computed steps that the worker has not fetched: an engine process runs one step ahead of the
# worker.
_MAX_STEPS_AHEAD = 2
# Step interval while all requests wait for handoffs, like that of an idle vLLM.
_POLL_S = 1e-3
_NO_IMAGES = "the KV cache of its images is gone, and this worker does not have the images"


class SimulatedEngine:
    """An `Engine` (engine/base.py) without a model; steps last as long as the latency model says.

    Args:
        model: Local directory or hub ID with a tokenizer.json.
        served_name: Name of the model in requests.
        settings: Sizes and timing.
        transfer_socket: Control socket of the transfer service; empty: no handoffs.
        adapters: Names of LoRA adapters. With an adapter a prompt gets other tokens and KV bytes.
        follows_step_targets: Whether step targets limit the steps. Otherwise, and with a
            `time_scale` of 0, prompts are computed first come, first served.
        host_kv_tokens: Size of the KV store in host memory in tokens; 0: none.
    """

    def __init__(
        self,
        model: str,
        served_name: str,
        settings: SimulatedConfig,
        transfer_socket: str,
        adapters: Sequence[str] = (),
        *,
        follows_step_targets: bool = True,
        host_kv_tokens: int = 0,
    ) -> None:
        self._adapters = adapters
        self._model, self._served_name, self._settings = model, served_name, settings
        self._transfer_socket = transfer_socket
        self._latency = LatencyModel.from_config(settings)
        self._layout = KvLayout(
            model=served_name,
            revision=f"simulated-{_VERSION}",
            dtype="uint8",
            num_layers=settings.num_layers,
            num_kv_heads=1,
            head_size=settings.block_bytes,
            block_size_tokens=settings.block_size_tokens,
            block_bytes=settings.block_bytes,
            axes="digest",
        )
        self._blocks = BlockPool(
            settings.kv_tokens // settings.block_size_tokens, settings.block_size_tokens
        )
        num_host_blocks = host_kv_tokens // settings.block_size_tokens
        self._host = HostTier(num_host_blocks) if num_host_blocks else None
        limits_steps = follows_step_targets and settings.time_scale > 0
        self._scheduler = Scheduler(
            self._blocks,
            settings.max_num_seqs,
            settings.max_num_batched_tokens,
            end_wait=self._end_wait,
            on_start=self._on_start,
            caching_block_tokens=settings.block_size_tokens if settings.prefix_caching else 0,
            model=self._latency.scaled(settings.time_scale) if limits_steps else None,
            host=self._host,
            load_block_s=self._all_layers_bytes / settings.host_bytes_per_s * settings.time_scale,
        )
        self._requests: dict[str, LiveRequest] = {}
        self._arrivals = itertools.count()
        self._vocabulary: Vocabulary | None = None
        self._sampler: Sampler | None = None
        self._answers: WrittenAnswers | None = None
        self._images: ImageRenderer | None = None
        self._port: HandoffPort | None = None
        self._task: asyncio.Task[None] | None = None
        self._dead: str | None = None
        self._num_steps = 0
        self._samples: deque[StepSample] = deque(maxlen=_MAX_SAMPLES)
        self._trace: StepTrace | None = None
        self._pending_outputs: list[EngineOutput] = []
        self._steps: deque[EngineStep] = deque()
        self._has_work, self._has_steps, self._has_room = (asyncio.Event() for _ in range(3))
        self._has_room.set()

    @property
    def _all_layers_bytes(self) -> int:
        """Bytes of one block of all layers; `settings.block_bytes` are those of one layer."""
        return self._settings.num_layers * self._settings.block_bytes

    async def start(self) -> EngineInfo:
        settings = self._settings
        if settings.kv_tokens < settings.max_model_len:
            raise EngineDead(
                f"simulated.kv_tokens is {settings.kv_tokens}; must hold one request of "
                f"simulated.max_model_len {settings.max_model_len} tokens"
            )
        begun_at = monotonic()
        try:
            self._vocabulary = await asyncio.to_thread(Vocabulary.load, self._model)
            self._sampler = Sampler(self._vocabulary, settings.mean_output_tokens)
            self._answers = WrittenAnswers(self._vocabulary, settings.answers)
            if settings.image_tokens:
                renderer = (self._model, settings.image_tokens)
                self._images = await asyncio.to_thread(ImageRenderer, *renderer)
            if self._transfer_socket:
                self._port = HandoffPort(self._transfer_socket, self._layout)
        except (ValueError, ServiceGone) as error:
            raise EngineDead(str(error)) from None
        self._task = asyncio.create_task(self._run(), name="simulated engine")
        return EngineInfo(
            engine="simulated",
            version=_VERSION,
            device="none",
            model=common_pb2.ModelDescription(
                name=self._served_name,
                revision=self._layout.revision,
                max_model_len=settings.max_model_len,
                vocab_size=self._vocabulary.size,
                tokenizer=self._model,
                adapters=[common_pb2.LoraAdapter(name=name) for name in self._adapters],
                takes_images=settings.image_tokens > 0,
            ),
            layout=self._layout,
            kv_tokens=self._blocks.num_blocks * settings.block_size_tokens,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            supports_forced_tokens=True,
            keeps_prefixes=settings.prefix_caching,
            host_kv_tokens=(
                self._host.num_blocks * settings.block_size_tokens if self._host is not None else 0
            ),
            weights_s=monotonic() - begun_at,
        )

    async def render(self, chat: inference_pb2.ChatPrompt, max_pixels: int) -> RenderedPrompt:
        """Renders a chat; it reads no pixels, so they have no limit."""
        if self._images is None:
            raise InvalidArgument("chat", "images", "this model takes no images")
        return await asyncio.to_thread(self._images.render, chat)

    async def submit(self, request: EngineRequest) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)
        assert self._vocabulary is not None, "submit before start"
        assert self._answers is not None
        max_output_tokens = self._validated(request, self._vocabulary)
        prompt, now = list(request.prompt_token_ids), monotonic()
        written = self._answers.find(prompt)
        # Tokens that depend on the prompt depend on its images too.
        keyed = keyed_tokens(prompt, request.images)
        chain = TokenChain(self._vocabulary, keyed, request.adapter, written)
        chain.advance(request.known_token_ids)
        text = OutputText(self._vocabulary, prompt, request.sampling)
        text.replay(request.known_token_ids, request.known_text_chars)
        live = LiveRequest(
            request=request,
            order=(request.priority, next(self._arrivals)),
            max_output_tokens=max_output_tokens,
            tokens=[*prompt, *request.known_token_ids],
            chain=chain,
            text=text,
            submitted_at=now,
            send=self._port.send(request.send, keyed, request.adapter)
            if self._port and request.send
            else None,
            receive_deadline=now + request.receive.timeout_s if request.receive else None,
        )
        self._requests[request.engine_request_id] = live
        if self._port is not None and (receive := request.receive) and receive.is_fetch:
            self._scheduler.keep_prefix(live, receive.skip_tokens)
        self._scheduler.add(live)
        self._has_work.set()

    async def abort(self, engine_request_ids: Sequence[str]) -> None:
        gone = set(engine_request_ids)
        for engine_request_id in gone:
            if live := self._requests.get(engine_request_id):
                self._forget(live)
        for step in self._steps:
            step.outputs = [
                output for output in step.outputs if output.engine_request_id not in gone
            ]
        self._pending_outputs = [
            output for output in self._pending_outputs if output.engine_request_id not in gone
        ]
        self._has_work.set()

    async def next_step(self) -> EngineStep:
        while not self._steps:
            if self._dead is not None:
                raise EngineDead(self._dead)
            self._has_steps.clear()
            await self._has_steps.wait()
        step = self._steps.popleft()
        self._has_room.set()
        return step

    def take_load(self) -> EngineLoad:
        samples, self._samples = tuple(self._samples), deque(maxlen=_MAX_SAMPLES)
        num_loaded = self._scheduler.take_loaded()
        return EngineLoad(
            num_steps=self._num_steps,
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            kv_tokens_used=self._blocks.num_used_tokens,
            kv_tokens_total=self._blocks.num_blocks * self._settings.block_size_tokens,
            prefill_tokens_waiting=sum(
                request.num_missing
                for request in self._requests.values()
                if request.num_missing > 1
            ),
            samples=samples,
            host_loads=TierLoads(
                num_loaded * self._all_layers_bytes, num_loaded * self._scheduler.load_block_s
            ),
        )

    def set_step_targets(self, targets: StepTargets) -> None:
        self._scheduler.targets = targets

    async def drop_cache(
        self, cache_salt: str | None, block_hashes: Collection[int] | None = None
    ) -> DroppedBlocks:
        if self._dead is not None:
            raise EngineDead(self._dead)
        dropped = DroppedBlocks(*self._scheduler.delete(cache_salt, block_hashes))
        self._publish([])
        return dropped

    async def start_profile(self) -> None:
        self._trace = StepTrace()

    async def stop_profile(self) -> Sequence[Trace]:
        """Ends the recording; returns one trace, for rank 0."""
        trace, self._trace = self._trace, None
        if trace is None:
            return ()
        # The file goes into the worker's own directory, beside the socket.
        directory = Path(self._transfer_socket).parent if self._transfer_socket else None
        descriptor, name = tempfile.mkstemp(".trace.json", dir=directory)
        os.close(descriptor)
        await asyncio.to_thread(trace.write, Path(name))
        return (Trace(0, Path(name)),)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._die("the engine was stopped")
        for live in list(self._requests.values()):
            self._forget(live)
        if self._port is not None:
            self._port.close()
            self._port = None
        if self._images is not None:
            self._images.close()
            self._images = None

    def preempt(self, engine_request_id: str) -> bool:
        """Preempts a running request as if blocks had run short; for tests.

        Returns:
            Whether the request was running.
        """
        live = self._requests.get(engine_request_id)
        if live is None or live not in self._scheduler.running:
            return False
        self._scheduler.preempt(live)
        return True

    def check_integrity(self) -> None:
        """Raises RuntimeError if blocks are leaked, or held while there are no requests."""
        self._blocks.check_integrity()
        if not self._requests and self._blocks.num_used_blocks:
            raise RuntimeError(
                f"{self._blocks.num_used_blocks} KV blocks are held without a request"
            )
        if self._host is not None:
            self._host.check_integrity()
            if not self._requests and self._host.num_loads:
                raise RuntimeError(f"{self._host.num_loads} loads go on without a request")

    def _validated(self, request: EngineRequest, vocabulary: Vocabulary) -> int:
        """Checks a request; returns the most output tokens that it may have.

        Raises:
            RequestRejected: The engine does not accept the request.
        """
        num_prompt, limit = len(request.prompt_token_ids), self._settings.max_model_len
        if request.engine_request_id in self._requests:
            raise RequestRejected(f"request {request.engine_request_id} is running already")
        if request.adapter and request.adapter not in self._adapters:
            raise RequestRejected(f"adapter {request.adapter!r} is not loaded here")
        if not 0 < num_prompt < limit:
            raise RequestRejected(f"prompt has {num_prompt} tokens; must be 1 to {limit - 1}")
        if max(request.prompt_token_ids) >= vocabulary.size or min(request.prompt_token_ids) < 0:
            raise RequestRejected(f"prompt has a token id outside 0 to {vocabulary.size - 1}")
        if (request.send or request.receive) and self._port is None:
            raise RequestRejected("this engine has no transfer service")
        sampling, most = request.sampling, limit - num_prompt
        wanted = sampling.max_tokens if sampling.HasField("max_tokens") else most
        if len(request.known_token_ids) >= min(wanted, most):
            raise RequestRejected(
                f"{len(request.known_token_ids)} known tokens; max_tokens is {min(wanted, most)}"
            )
        return min(wanted, most)

    def _die(self, message: str) -> None:
        if self._dead is None:
            self._dead = message
        self._has_steps.set()

    def _forget(self, live: LiveRequest) -> None:
        """Ends a request, and frees its blocks and its handoff."""
        del self._requests[live.id]
        self._scheduler.remove(live)
        if live.receive_deadline is not None and live.request.receive and self._port is not None:
            self._end_receive(live, live.request.receive)

    # ---- The step loop.

    async def _run(self) -> None:
        try:
            while True:
                await self._has_room.wait()
                self._has_work.clear()
                if self._port is not None:
                    self._port.poll()
                work = self._scheduler.schedule(monotonic())
                if work:
                    await self._compute(work)
                elif self._pending_outputs:
                    self._publish([])
                else:
                    await self._wait_for_work()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._die(f"the simulated engine failed: {type(error).__name__}: {error}")

    async def _wait_for_work(self) -> None:
        """Waits for a submit, an abort or a load; only shortly while requests wait for handoffs."""
        awaits_handoff = any(
            request.receive_deadline is not None for request in self._scheduler.waiting
        )
        timeout_s = _POLL_S if awaits_handoff else None
        if (load_at := self._scheduler.next_load_at) is not None:
            timeout_s = min(max(0.0, load_at - monotonic()), timeout_s or math.inf)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_work.wait()

    async def _compute(self, work: Sequence[Work]) -> None:
        started_at = monotonic()
        for item in work:
            if item.request.first_run_at is None:
                item.request.first_run_at = started_at
        chunks = [
            PrefillChunk(item.request.num_computed_here, item.num_tokens)
            for item in work
            if not item.is_decode
        ]
        kv_tokens = [len(item.request.tokens) for item in work if item.is_decode]
        duration_s = self._latency.step_s(chunks, len(kv_tokens), sum(kv_tokens))
        duration_s *= self._settings.time_scale
        await self._pass_layers(work, started_at, duration_s)
        outputs = [output for item in work if (output := self._advance(item)) is not None]
        ended_at = monotonic()
        self._num_steps += 1
        sample = StepSample(
            num_prefill_tokens=sum(chunk.num_tokens for chunk in chunks),
            num_decodes=len(kv_tokens),
            num_kv_tokens=sum(kv_tokens),
            duration_s=ended_at - started_at,
            prefill_token_squares=sum(chunk.token_squares for chunk in chunks),
        )
        self._samples.append(sample)
        if self._trace is not None:
            self._trace.step(
                started_at,
                ended_at,
                num_prefill_tokens=sample.num_prefill_tokens,
                num_decodes=sample.num_decodes,
                num_kv_tokens=sample.num_kv_tokens,
            )
        self._publish(outputs)

    async def _pass_layers(
        self, work: Sequence[Work], started_at: float, duration_s: float
    ) -> None:
        """Lets the step's time pass; stages each layer's finished blocks when it is computed."""
        # A request that is preempted during the step finishes the step's layers, as in vLLM.
        sending = [
            (item.request, item.request.send, item.request.num_computed + item.num_tokens)
            for item in work
            if item.request.send is not None
        ]
        if not sending:
            await _sleep_until(started_at + duration_s)
            return
        for layer in range(self._layout.num_layers):
            share = (layer + 1) / self._layout.num_layers
            await _sleep_until(started_at + duration_s * share)
            for request, send, num_computed_tokens in sending:
                if request.live:
                    send.write(layer, num_computed_tokens)

    def _advance(self, item: Work) -> EngineOutput | None:
        """Counts a request's computed tokens; samples a token once the prompt is computed."""
        live = item.request
        if not item.valid:
            return None
        live.num_computed += item.num_tokens
        live.num_computed_here += item.num_tokens
        self._scheduler.cache_blocks(live)
        return self._sample(live) if live.num_missing == 0 else None

    def _sample(self, live: LiveRequest) -> EngineOutput:
        assert self._sampler is not None, "a step before start"
        output = self._sampler.sample(live)
        if not live.reported:
            live.reported = True
            self._describe_start(live, output)
            output.prompt_logprobs = self._sampler.prompt_logprobs(live)
        if output.finish is not None:
            self._forget(live)
        return output

    @staticmethod
    def _describe_start(live: LiveRequest, output: EngineOutput) -> None:
        """Adds the timings of a request's start to its first output."""
        now = monotonic()
        first_run_at = live.first_run_at if live.first_run_at is not None else now
        output.timings = cluster_pb2.StageTimings(
            queue_us=round((first_run_at - live.submitted_at) * 1e6),
            run_us=round((now - first_run_at) * 1e6),
            handoff_wait_us=round((live.handoff_wait_s or 0.0) * 1e6),
        )
        output.num_cached_tokens = live.num_cached_tokens
        output.num_host_tokens = live.num_host_tokens
        output.num_handoff_tokens = live.num_handoff_tokens

    def _publish(self, outputs: list[EngineOutput]) -> None:
        outputs, self._pending_outputs = [*self._pending_outputs, *outputs], []
        host_change = self._host.take_change() if self._host is not None else None
        self._steps.append(EngineStep(outputs, self._blocks.take_change(), host_change))
        if len(self._steps) >= _MAX_STEPS_AHEAD:
            self._has_room.clear()
        self._has_steps.set()

    # ---- Receiving handoffs.

    def _end_wait(self, live: LiveRequest) -> bool:
        """Ends a request's wait for its handoff, if the wait is over.

        Notes how long the request has waited. If its fetch has not come, it loads nothing.

        Returns:
            Whether the request may start.
        """
        receive = live.request.receive
        if live.receive_deadline is None or receive is None or self._port is None:
            return True
        now = monotonic()
        is_committed = self._port.is_committed(receive.handoff_id)
        if now < live.receive_deadline:
            if not self._port.is_settled(receive.handoff_id):
                return False
            # The request that loads it has not started yet.
            if receive.only_waits and is_committed:
                return False
        if live.handoff_wait_s is None:
            live.handoff_wait_s = now - live.submitted_at
        if receive.is_fetch and (receive.only_waits or not is_committed):
            # The request starts like one without a fetch.
            self._end_receive(live, receive)
        return True

    def _end_receive(self, live: LiveRequest, receive: ReceiveHandoff) -> None:
        """Loads nothing of a handoff."""
        assert self._port is not None
        live.receive_deadline = None
        self._scheduler.release_prefix(live)
        if not receive.only_waits:
            self._port.release(receive.handoff_id)

    def _on_start(self, live: LiveRequest) -> None:
        """Loads the handoff of a request that is about to run, once.

        Ends the request if it would have to compute images that it does not have.
        """
        self._load_handoff(live)
        if live.live and live.num_computed < live.request.num_needed_tokens:
            finish = Finish.ABORTED if live.reported else Finish.PREFIX_GONE
            self._give_up(live, EngineOutput(live.id, finish=finish, error=_NO_IMAGES))

    def _load_handoff(self, live: LiveRequest) -> None:
        if live.request.only_cached and live.num_missing > 1:
            gone = EngineOutput(live.id, finish=Finish.PREFIX_GONE)
            if live.send is None or not live.send.has_written:
                gone.num_held_tokens = live.num_computed
            self._give_up(live, gone)
            return
        receive = live.request.receive
        if live.receive_deadline is None or receive is None or self._port is None:
            return
        if live.num_computed < receive.skip_tokens:
            self._end_receive(live, receive)
            if not receive.is_fetch:
                self._give_up(live, EngineOutput(live.id, finish=Finish.PREFIX_GONE))
            return
        live.receive_deadline = None
        self._scheduler.release_prefix(live)
        try:
            keyed = keyed_tokens(live.tokens, live.request.images)
            loaded = self._port.load(receive, keyed, live.request.adapter)
        except WrongHandoff as error:
            self._give_up(live, EngineOutput(live.id, finish=Finish.ERROR, error=str(error)))
            return
        # The last token is always computed, because the next token is sampled from its logits.
        live.num_computed = max(live.num_computed, min(loaded, len(live.tokens) - 1))
        live.num_handoff_tokens = max(0, loaded - live.num_cached_tokens)

    def _give_up(self, live: LiveRequest, output: EngineOutput) -> None:
        """Ends a request that was about to run; the scheduler frees its blocks."""
        live.live = False
        del self._requests[live.id]
        self._pending_outputs.append(output)


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - monotonic()))
