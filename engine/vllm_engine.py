"""Runs vLLM behind the interface of all engines (engine/base.py).

This module uses EngineCoreClient and OutputProcessor instead of AsyncLLM, which cannot return one
engine step as one list. vLLM's engine core and its ranks are separate processes; the KV connector
and the forced-tokens processor run inside them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.renderers import renderer_from_config
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor import Executor
from vllm.v1.metrics.stats import SchedulerStats

from baton.engine.base import (
    NO_LOADS,
    DroppedBlocks,
    EngineDead,
    EngineInfo,
    EngineLoad,
    EngineOutput,
    EngineRequest,
    EngineStep,
    RenderedPrompt,
    RequestRejected,
    StepSample,
    TierLoads,
    Trace,
)
from baton.engine.served_model import ServedModel
from baton.engine.vllm_forced_tokens import EXTRA_ARG
from baton.engine.vllm_images import VllmImages, without_pixels
from baton.engine.vllm_live import LiveRequest
from baton.engine.vllm_lora import lora_requests
from baton.engine.vllm_processes import kill_vllm, rank_segments
from baton.engine.vllm_profiler import VllmProfiler
from baton.engine.vllm_request import drop_request, engine_core_requests
from baton.engine.vllm_setup import VllmSetup
from baton.engine.vllm_step_targets import write_targets
from baton.kvtransfer.connector.request_params import DropOrder
from baton.kvtransfer.connector.step_report import StepReport
from baton.kvtransfer.connector.step_work import StepWork
from baton.kvtransfer.disk.directory import DiskDirectory
from baton.runtime.config import LatencyConfig
from baton.runtime.kv.kv_store_config import KvStoreConfig
from baton.runtime.process import affinity
from baton.runtime.steps.latency import LatencyModel
from baton.runtime.steps.step_budget import StepTargets
from baton.v1 import common_pb2, inference_pb2

# Most step costs that are kept for the next load report.
_MAX_SAMPLES = 256
_TIERS = ("host", "disk")
_NO_STORE = KvStoreConfig(host_bytes=0)
_PRIOR = LatencyModel.from_config(LatencyConfig())
_STOP_TIMEOUT_S = 10.0
_KILL_INTERVAL_S = 0.1
# Exceptions that vLLM raises for a request that it does not accept.
_WRONG_REQUEST = (VLLMClientError, ValueError, TypeError)


class VllmEngine:
    """One vLLM engine process group.

    Args:
        served: The model.
        transfer_socket: Control socket of this worker's transfer service.
        scheduler: Which scheduler chooses the prompt tokens of a step (steps.scheduler).
        prior: Latency model of Baton's scheduler until it has measured steps.
        kv_store: Host memory and disk for copies of full KV blocks.
    """

    def __init__(
        self,
        served: ServedModel,
        transfer_socket: str,
        *,
        scheduler: Literal["baton", "vllm"] = "baton",
        prior: LatencyModel = _PRIOR,
        kv_store: KvStoreConfig = _NO_STORE,
    ) -> None:
        self._served, self._transfer_socket = served, transfer_socket
        self._lora_requests = lora_requests(served.adapters)
        self._traces = Path(transfer_socket).parent / "traces"
        self._live: dict[str, LiveRequest] = {}
        self._by_vllm_id: dict[str, LiveRequest] = {}
        self._prior = prior if scheduler == "baton" else None
        self._kv_store = kv_store
        self._disk: DiskDirectory | None = None
        self._counter = itertools.count(1)
        self._stats = SchedulerStats()
        self._num_steps = 0
        self._samples: deque[StepSample] = deque(maxlen=_MAX_SAMPLES)
        self._last_step_at = 0.0
        self._tier_loads = dict.fromkeys(_TIERS, NO_LOADS)
        # Orders to delete KV blocks, by their IDs.
        self._drops: dict[int, asyncio.Future[DroppedBlocks]] = {}
        self._core: Any = None
        self._profiler: VllmProfiler | None = None
        self._starting: asyncio.Future[EngineInfo] | None = None
        self._stopping = False

    async def start(self) -> EngineInfo:
        try:
            # Loading takes long, and the event loop must stay free for signals.
            self._starting = asyncio.get_running_loop().run_in_executor(None, self._start)
            info = await asyncio.shield(self._starting)
            if info.layout.pp_size > 1:
                await self._core.collective_rpc_async("baton_make_stage_buffers")
            for name, lora in self._lora_requests.items():
                if not await self._core.add_lora_async(lora):
                    raise EngineDead(f"lora_adapters.{name}: vLLM did not load {lora.lora_path}")
            return info
        except EngineDead:
            raise
        except Exception as error:
            raise EngineDead(f"vLLM could not start: {' '.join(str(error).split())}") from error

    def _start(self) -> EngineInfo:
        begun_at, store = time.monotonic(), self._kv_store
        setup = VllmSetup.make(
            self._served,
            self._transfer_socket,
            self._traces,
            prior=self._prior,
            host_bytes=store.resolved_host_bytes(),
        )
        if store.disk_dir:
            self._disk = setup.open_disk(store.disk_dir, store.disk_bytes)
        config = setup.config
        renderer = renderer_from_config(config)
        self._input = InputProcessor(config, renderer)
        self._images = VllmImages(self._input)
        self._output = OutputProcessor(renderer.tokenizer, log_stats=False)
        if self._stopping:
            raise EngineDead("stopped before it had started")
        self._core = EngineCoreClient.make_async_mp_client(
            config, Executor.get_class(config), log_stats=True, renderer=renderer
        )
        self._profiler = VllmProfiler(self._core, self._traces)
        # The ranks have inherited their cores by now; token handling must not use a rank's core.
        affinity.avoid_cores(setup.rank_cpus)
        setup = setup.started()
        self._kv_tokens = setup.kv_tokens
        info = setup.info(self._served, begun_at)
        return dataclasses.replace(info, disk_bytes_per_s=store.disk_bytes_per_s)

    async def submit(self, request: EngineRequest) -> None:
        if request.engine_request_id in self._live:
            raise RequestRejected(f"request {request.engine_request_id} is already running here")
        live = LiveRequest(request, self._new_vllm_id(request), submitted_at=time.monotonic())
        if request.chat is not None:
            live.features = await asyncio.to_thread(self._images.processed, request, request.chat)
        else:
            live.features = [without_pixels(image) for image in request.images]
        await self._submit(live)

    async def render(self, chat: inference_pb2.ChatPrompt, max_pixels: int) -> RenderedPrompt:
        return await asyncio.to_thread(self._images.render, chat, max_pixels)

    def _new_vllm_id(self, request: EngineRequest) -> str:
        return f"{request.engine_request_id}#{next(self._counter)}"

    async def _submit(self, live: LiveRequest) -> None:
        # Images may have taken long to prepare, and a retry comes much later.
        waited_s = time.monotonic() - live.submitted_at
        request = dataclasses.replace(live.request, due_in_s=live.request.due_in_s - waited_s)
        try:
            lora = self._lora_request(request.adapter)
            shown, run = engine_core_requests(
                self._input, request, live.vllm_id, lora, live.features
            )
        except _WRONG_REQUEST as error:
            raise RequestRejected(" ".join(str(error).split())) from error
        self._output.add_request(shown, prompt=None)
        self._replay(live, run)
        self._live[request.engine_request_id] = self._by_vllm_id[live.vllm_id] = live
        await self._add(run)

    async def _add(self, run: EngineCoreRequest) -> None:
        try:
            await self._core.add_request_async(run)
        except EngineDeadError as error:
            raise EngineDead(str(error)) from error

    def _lora_request(self, adapter: str) -> LoRARequest | None:
        """Returns vLLM's request of an adapter; None: no adapter. Raises ValueError if unknown."""
        if not adapter:
            return None
        found = self._lora_requests.get(adapter)
        if found is None:
            loaded = ", ".join(self._lora_requests) or "none"
            raise ValueError(f"adapter {adapter!r} is not loaded here; loaded: {loaded}")
        return found

    def _replay(self, live: LiveRequest, run: EngineCoreRequest) -> None:
        """Feeds the known tokens to the detokenizer."""
        request = live.request
        if not request.known_token_ids or request.prefill_only:
            return
        live.num_known_chars = request.known_text_chars
        if run.sampling_params.extra_args.get(EXTRA_ARG):
            live.num_known_tokens = len(request.known_token_ids)
            return
        detokenizer = self._output.request_states[live.vllm_id].detokenizer
        detokenizer.update(list(request.known_token_ids), False)
        text = detokenizer.get_next_output_text(finished=False, delta=True)
        live.pending_text = live.without_known(text)

    async def abort(self, engine_request_ids: Sequence[str]) -> None:
        found = [
            live for name in dict.fromkeys(engine_request_ids) if (live := self._live.get(name))
        ]
        if not found:
            return
        for live in found:
            self._withdraw(live)
        await self._core.abort_requests_async([live.vllm_id for live in found])

    def _withdraw(self, live: LiveRequest) -> None:
        """Forgets a request, also in the output processor, which reports nothing more for it."""
        self._forget(live)
        self._output.abort_requests([live.vllm_id], internal=True)

    def _forget(self, live: LiveRequest) -> None:
        del self._live[live.request.engine_request_id], self._by_vllm_id[live.vllm_id]

    async def drop_cache(
        self, cache_salt: str | None, block_hashes: Collection[int] | None = None
    ) -> DroppedBlocks:
        drop_id = next(self._counter)
        dropped: asyncio.Future[DroppedBlocks] = asyncio.get_running_loop().create_future()
        self._drops[drop_id] = dropped
        try:
            drop = DropOrder(drop_id, cache_salt, block_hashes)
            order = drop_request(self._input, f"drop#{drop_id}", drop)
            await self._add(order)
            return await dropped
        finally:
            del self._drops[drop_id]

    async def next_step(self) -> EngineStep:
        try:
            outputs = await self._core.get_output_async()
        except EngineDeadError as error:
            dead = EngineDead(f"vLLM's engine core died: {error}")
            for dropped in self._drops.values():
                if not dropped.done():
                    dropped.set_exception(dead)
            raise dead from error
        self._num_steps += 1
        step = EngineStep()
        if outputs.scheduler_stats is not None:
            self._stats = outputs.scheduler_stats
            report = StepReport.decode(self._stats.kv_connector_stats or {})
            await self._take_report(report, outputs.timestamp, step)
        if not outputs.outputs:
            return step
        for output in outputs.outputs:
            self._prepare_output(output)
        await self._retry_failed_loads(outputs.outputs, step)
        processed = self._output.process_outputs(outputs.outputs, outputs.timestamp)
        for made in processed.request_outputs:
            live = self._by_vllm_id.get(made.request_id)
            output = live.output(made, outputs.timestamp) if live else None
            if output is not None:
                step.outputs.append(output)
        self._forget_finished(step.outputs)
        if processed.reqs_to_abort:
            await self._core.abort_requests_async(processed.reqs_to_abort)
        return step

    async def _take_report(self, report: StepReport, timestamp: float, step: EngineStep) -> None:
        """Takes the connector's report on a step.

        Args:
            report: The report.
            timestamp: End of the step, by time.monotonic.
            step: Receives the parts that the worker needs.
        """
        if report.is_cut_off:
            # The service may still run, but it has lost part of this engine's messages.
            raise EngineDead(
                "vLLM has lost its transfer service, or a thread that notifies it has failed "
                "(the log has the reason): it hands over nothing more"
            )
        self._sample(report.work, timestamp)
        step.cache, step.host_cache = report.cache, report.host_cache
        step.disk_cache = report.disk_cache
        step.num_wrong_files, step.disk_failed = report.num_wrong_files, report.disk_failed
        for vllm_id, load in report.host_loads.items():
            if (live := self._by_vllm_id.get(vllm_id)) is not None:
                live.num_host_tokens = load.num_tokens - load.num_from_disk
                live.num_disk_tokens = load.num_from_disk
        for tier, loads in report.tier_loads.items():
            before = self._tier_loads[tier]
            self._tier_loads[tier] = TierLoads(
                before.num_bytes + loads.num_bytes, before.seconds + loads.seconds
            )
        for drop_id, blocks in report.dropped.items():
            if (dropped := self._drops.get(drop_id)) is not None and not dropped.done():
                dropped.set_result(DroppedBlocks(*blocks))
        for vllm_id, num_held_tokens in report.gone.items():
            # The request waits in vLLM until it is aborted, and may be reported again until then.
            if (live := self._by_vllm_id.get(vllm_id)) is not None:
                await self.abort([live.request.engine_request_id])
                step.outputs.append(live.gone(num_held_tokens))

    async def _retry_failed_loads(self, outputs: list[EngineCoreOutput], step: EngineStep) -> None:
        """Runs requests with failed handoff loads again, and removes their outputs.

        A request that lacks its images ends with Finish.PREFIX_GONE instead.
        """
        for output in [each for each in outputs if self._failed_to_load(each)]:
            outputs.remove(output)
            # The request may have been aborted while this loop retried another one.
            if (live := self._by_vllm_id.get(output.request_id)) is None:
                continue
            self._withdraw(live)
            if live.request.num_needed_tokens:
                step.outputs.append(live.gone(0))
            else:
                await self._retry(live)

    def _forget_finished(self, outputs: Sequence[EngineOutput]) -> None:
        finished = [
            live
            for output in outputs
            if output.finish and (live := self._live.get(output.engine_request_id))
        ]
        for live in finished:
            self._forget(live)
        cut = [live.vllm_id for live in finished if live.cut]
        self._output.abort_requests(cut, internal=True)

    def _failed_to_load(self, output: EngineCoreOutput) -> bool:
        live = self._by_vllm_id.get(output.request_id)
        return (
            output.finish_reason == FinishReason.ERROR
            and live is not None
            and not live.reported
            and not live.retried
            and not live.request.only_cached
        )

    async def _retry(self, live: LiveRequest) -> None:
        """Runs a withdrawn request again from its prompt, without handoffs.

        vLLM has ended the request and given its send up, so its staging may belong to another
        handoff.
        """
        sampling = live.request.sampling
        if not live.request.returns_prompt_logprobs and sampling.HasField("prompt_logprobs"):
            # The prefill worker has returned them, and for them vLLM would use no cached blocks.
            sampling = common_pb2.SamplingParams()
            sampling.CopyFrom(live.request.sampling)
            sampling.ClearField("prompt_logprobs")
        request = dataclasses.replace(live.request, sampling=sampling, receive=None, send=None)
        again = LiveRequest(request, self._new_vllm_id(request), live.submitted_at, retried=True)
        again.features = live.features
        await self._submit(again)

    def _prepare_output(self, output: EngineCoreOutput) -> None:
        """Takes what the output processor drops, and undoes the end of a prefill-only request."""
        live = self._by_vllm_id.get(output.request_id)
        if live is None:
            return
        for event in output.events or ():
            if event.type == EngineCoreEventType.SCHEDULED and live.scheduled_at is None:
                live.scheduled_at = event.timestamp
        # vLLM sends the statistics with the first token, which may be a forced one that is not
        # reported.
        live.prefill_stats = live.prefill_stats or output.prefill_stats
        if not live.request.prefill_only or output.finish_reason != FinishReason.LENGTH:
            return
        shown = self._output.request_states[output.request_id].max_tokens_param
        if shown > 1:
            # The engine core was given max_tokens 1. To the client the request continues, and text
            # that may still change is held back.
            output.finish_reason, live.cut = None, True

    def _sample(self, work: StepWork | None, timestamp: float) -> None:
        """Records a step's cost for the next load report.

        Args:
            work: The step's work. None if the step loaded handoffs or computed
                nothing: its time says nothing about the model.
            timestamp: End of the step, by time.monotonic.
        """
        if work is not None:
            # The step may have been scheduled while the previous one ran.
            started_at = max(work.scheduled_at, self._last_step_at)
            self._samples.append(
                StepSample(
                    num_prefill_tokens=work.num_prefill_tokens,
                    num_decodes=work.num_decodes,
                    num_kv_tokens=work.num_kv_tokens,
                    duration_s=max(0.0, timestamp - started_at),
                    prefill_token_squares=work.prefill_token_squares,
                )
            )
        self._last_step_at = timestamp

    def take_load(self) -> EngineLoad:
        samples = list(self._samples)
        self._samples.clear()
        loads, self._tier_loads = self._tier_loads, dict.fromkeys(_TIERS, NO_LOADS)
        waiting = [live for live in self._live.values() if not live.reported]
        num_waiting = self._stats.num_waiting_reqs + self._stats.num_skipped_waiting_reqs
        return EngineLoad(
            num_steps=self._num_steps,
            num_running=self._stats.num_running_reqs,
            num_waiting=num_waiting,
            kv_tokens_used=round(self._stats.kv_cache_usage * self._kv_tokens),
            kv_tokens_total=self._kv_tokens,
            prefill_tokens_waiting=sum(len(live.request.prompt_token_ids) for live in waiting),
            samples=samples,
            host_loads=loads["host"],
            disk_loads=loads["disk"],
        )

    def set_step_targets(self, targets: StepTargets) -> None:
        write_targets(self._transfer_socket, targets)

    async def start_profile(self) -> None:
        assert self._profiler is not None, "start_profile before start"
        await self._profiler.start()

    async def stop_profile(self) -> Sequence[Trace]:
        assert self._profiler is not None, "stop_profile before start"
        return await self._profiler.stop()

    async def stop(self) -> None:
        self._stopping = True
        segments = await self._end_start()
        core, self._core = self._core, None
        children = psutil.Process().children(recursive=True)
        segments |= await asyncio.to_thread(rank_segments, children)
        if core is not None:
            with contextlib.suppress(Exception):
                await asyncio.to_thread(core.shutdown, _STOP_TIMEOUT_S)
        # Kill the processes that vLLM has left.
        engine = kill_vllm(children)
        await asyncio.to_thread(psutil.wait_procs, engine, _STOP_TIMEOUT_S)
        for segment in segments:
            segment.unlink(missing_ok=True)
        if self._disk is not None:
            self._disk.close()

    async def _end_start(self) -> set[Path]:
        """Ends a start that was interrupted: this process cannot exit before the start's thread.

        The thread gives up, and starts no more processes, when the processes that it has started
        are dead. This method kills them and waits a few seconds for the thread.

        Returns:
            Shared memory segments of the killed processes.
        """
        segments: set[Path] = set()
        if self._starting is None:
            return segments
        # Retrieve the exception, because no other code awaits this future.
        self._starting.add_done_callback(lambda starting: starting.exception())
        until = time.monotonic() + _STOP_TIMEOUT_S
        while not self._starting.done() and time.monotonic() < until:
            children = psutil.Process().children(recursive=True)
            segments |= await asyncio.to_thread(rank_segments, children)
            kill_vllm(children)
            await asyncio.wait([self._starting], timeout=_KILL_INTERVAL_S)
        return segments
