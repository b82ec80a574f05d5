"""Starts one worker in numbered steps; serving.py has its life after that."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic

from baton.engine.base import Engine, EngineDead, EngineInfo, EngineStep
from baton.engine.warm_up import warm_up
from baton.kvtransfer import staging_size
from baton.kvtransfer.addresses import with_listen_address
from baton.kvtransfer.errors import ServiceGone, TransferError
from baton.kvtransfer.transfer_client import TransferClient
from baton.runtime.config import BatonConfig, PoolConfig, exposure
from baton.runtime.enum_names import role_name
from baton.runtime.names import FIRST_REVISION
from baton.runtime.process import lifecycle, worker_directory
from baton.runtime.process.locked_directory import LockedDirectory
from baton.runtime.security.dial import within_cluster
from baton.runtime.security.refusals import Refusals
from baton.runtime.telemetry import tracing
from baton.runtime.telemetry.metrics import MetricsServer
from baton.runtime.telemetry.tracing import Tracing
from baton.v1 import common_pb2
from baton.worker import gpus
from baton.worker.attach import Attachment
from baton.worker.cache_drops import CacheDrops
from baton.worker.errors import WorkerFailed
from baton.worker.handoffs import HandoffLog
from baton.worker.hello import Identity
from baton.worker.host import WorkerHost
from baton.worker.load_reports import LoadReports
from baton.worker.metrics import WorkerCollector
from baton.worker.outbox import Outbox
from baton.worker.profiles import Profiles
from baton.worker.renders import Renders
from baton.worker.runner import Runner
from baton.worker.serving import AttachedWorker
from baton.worker.tier_reports import TierReports

_log = logging.getLogger(__name__)

# A worker accepts its pool's limit of requests times this factor, because requests that are being
# cleaned up still count when the requests after them start.
_REQUESTS_FACTOR = 2

EngineFactory = Callable[[BatonConfig, PoolConfig, str], Engine]


class Worker:
    """Owns the parts of one worker; each start step registers its stop step.

    Args: See `serve` in worker/main.py.
    """

    def __init__(
        self,
        config: BatonConfig,
        role: common_pb2.Role.ValueType,
        coordinator: str,
        worker_id: str,
        directory: str,
        engine_factory: EngineFactory,
    ) -> None:
        self._config, self._role, self._directory = config, role, directory
        self._coordinator, self._worker_id = coordinator, worker_id
        self._engine_factory = engine_factory
        is_prefill = role == common_pb2.ROLE_PREFILL
        self._pool = config.prefill if is_prefill else config.decode
        most = {
            common_pb2.ROLE_PREFILL: config.prefill.max_requests_per_worker,
            common_pb2.ROLE_DECODE: config.decode.max_requests_per_worker,
        }
        if config.is_elastic:
            # Any worker may hold prompts and decodes at the same time.
            most = dict.fromkeys(most, sum(most.values()))
        self._max_requests = {role: _REQUESTS_FACTOR * number for role, number in most.items()}
        self._startup_ms: dict[str, int] = {}

    async def run(self, stop: asyncio.Event, ready: Callable[[str], None] | None) -> None:
        """Runs until told to leave. Raises WorkerFailed or ConfigError when it cannot continue."""
        async with contextlib.AsyncExitStack() as stack:
            starting = asyncio.create_task(self._start(stack), name="start")
            stopping = asyncio.create_task(stop.wait(), name="stop")
            try:
                await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():
                    # The worker must leave while its model loads: no request has to finish.
                    return
                await starting.result().serve(stopping, ready)
            finally:
                for task in (starting, stopping):
                    task.cancel()
                await asyncio.gather(starting, stopping, return_exceptions=True)

    async def _start(self, stack: contextlib.AsyncExitStack) -> AttachedWorker:
        config, security = self._config, self._config.security
        # Checks come before the steps that take long.
        tracing.require(config.tracing)
        exposure.check_metrics("worker.metrics_listen", config.worker.metrics_listen, security)
        dial = within_cluster(security, with_tls=security.dials_tls)
        self._record_startup("process", lifecycle.process_started_at())

        # 1. The transfer service, which the engine connects to while it starts.
        transfer, socket_path = await self._start_transfer(stack)
        # 2. The engine: loads the model and runs a warm-up step.
        engine, info, warm_up_steps = await self._start_engine(stack, transfer, socket_path)
        # 3. From here on the transfer service accepts handoffs.
        try:
            await transfer.configure(info.layout.fingerprint())
        except ServiceGone as error:
            raise WorkerFailed(str(error)) from None
        except TransferError as error:
            raise WorkerFailed(f"transfer service: {error}") from None
        # 4. Metrics and spans.
        collector, metrics = self._start_metrics(stack, info)
        handoffs = HandoffLog(self._start_tracing(stack))
        # 5. The request runner, and the stream to the coordinator.
        outbox = Outbox()
        tiers = TierReports(outbox)
        for step in warm_up_steps:
            tiers.take_disk(step)
        runner = Runner(
            engine,
            info.layout,
            transfer,
            outbox,
            tiers,
            handoffs,
            max_requests=self._max_requests[self._role],
            open_timeout_s=config.kv_transfer.open_timeout_s,
        )
        profiles = Profiles(engine, outbox)
        cache_drops = CacheDrops(engine, outbox, transfer.erase_staging)
        renders = Renders(engine, outbox)
        for part in (profiles, cache_drops, renders):
            stack.push_async_callback(part.close)
        host = WorkerHost(
            self._identity().hello(self._role, info, transfer),
            engine=engine,
            runner=runner,
            outbox=outbox,
            collector=collector,
            profiles=profiles,
            handlers={
                "prefill": runner.start_prefill,
                "decode": runner.start_decode,
                "send_prefix": runner.send_prefix,
                "cancel": runner.cancel,
                "profile": profiles.on_command,
                "drop_cache": cache_drops.on_command,
                "render": renders.on_command,
            },
            max_requests=self._max_requests,
        )
        attachment = Attachment(
            self._coordinator,
            host,
            outbox,
            LoadReports(
                *(engine, transfer, runner, tiers, handoffs, collector),
                is_profiling=lambda: profiles.recording,
            ),
            attach_timeout_s=config.worker.attach_timeout_s,
            dial=dial,
        )
        _log.info("engine is up", extra={"kv": transfer.address, "metrics": metrics.address})
        return AttachedWorker(
            host, runner, attachment, drain_timeout_s=config.worker.drain_timeout_s
        )

    def _identity(self) -> Identity:
        config = self._config.worker
        return Identity(
            self._worker_id,
            secrets.randbits(63) | 1,
            _host_id(),
            startup_ms=self._startup_ms,
            labels={"host": socket.gethostname(), **config.labels},
            revision=config.revision,
            config_digest=_digest(self._config, self._pool),
        )

    async def _start_transfer(self, stack: contextlib.AsyncExitStack) -> tuple[TransferClient, str]:
        """Starts the transfer service; returns its client and its control socket."""
        config, begun_at = self._config, monotonic()
        directory = self._own_directory()
        stack.callback(directory.remove)
        socket_path = str(directory.path / "kv.sock")
        listening = with_listen_address(config.kv_transfer, self._coordinator)
        exposure.check_transfer(listening.listen, config.security)
        try:
            transfer = await TransferClient.start(
                listening, socket_path, security=config.security, log_level=config.log_level
            )
        except TransferError as error:
            raise WorkerFailed(f"transfer service: {error}") from None
        stack.push_async_callback(transfer.close)
        self._record_startup("transfer", begun_at)
        return transfer, socket_path

    async def _start_engine(
        self, stack: contextlib.AsyncExitStack, transfer: TransferClient, socket_path: str
    ) -> tuple[Engine, EngineInfo, list[EngineStep]]:
        """Starts the engine; returns it with its description and the steps of its warm-up."""
        config, begun_at = self._config, monotonic()
        try:
            engine = self._engine_factory(config, self._pool, socket_path)
        except lifecycle.SignalReceived:
            # The event loop handles the signal next, and cancels this task.
            await asyncio.Event().wait()
            raise
        stack.push_async_callback(engine.stop)
        # The time before this is the import of the engine, which may take as long as the model.
        starting_at = monotonic()
        info, warm_up_steps = await self._loaded(engine, transfer)
        info = _with_revision(info, config.worker.revision)
        kv_at = starting_at + info.weights_s
        self._record_startup("weights", begun_at, kv_at)
        self._record_startup("kv", kv_at, kv_at + info.kv_s)
        self._record_startup("warm_up", kv_at + info.kv_s)
        problem = staging_size.shortage(
            info.layout, info.model.max_model_len, transfer.send_bytes, transfer.receive_bytes
        )
        if problem is not None:
            _log.warning(problem)
        return engine, info, warm_up_steps

    def _start_metrics(
        self, stack: contextlib.AsyncExitStack, info: EngineInfo
    ) -> tuple[WorkerCollector, MetricsServer]:
        config, role = self._config, role_name(self._role)
        collector = WorkerCollector(info.model.name, role, config.kv_transfer.transports)
        registry = collector.registry()
        if (found := gpus.collector(info.device, info.layout.num_ranks)) is not None:
            registry.register(found)
        refusals = Refusals(others=collector.transfer_refusals)
        registry.register(refusals)
        metrics = MetricsServer(
            config.worker.metrics_listen,
            "worker.metrics_listen",
            registry,
            config.security,
            refusals,
        )
        stack.push_async_callback(asyncio.to_thread, metrics.close)
        return collector, metrics

    def _start_tracing(self, stack: contextlib.AsyncExitStack) -> Tracing:
        role = role_name(self._role)
        spans = Tracing(
            self._config.tracing, {"baton.worker.id": self._worker_id, "baton.worker.role": role}
        )
        stack.push_async_callback(asyncio.to_thread, spans.close)
        return spans

    def _own_directory(self) -> LockedDirectory:
        if not self._directory:
            return worker_directory.make()
        try:
            return LockedDirectory(Path(self._directory))
        except OSError as error:
            raise WorkerFailed(f"--directory: {error}") from None

    async def _loaded(
        self, engine: Engine, transfer: TransferClient
    ) -> tuple[EngineInfo, list[EngineStep]]:
        """Waits until the engine has loaded its model and has run its warm-up."""
        timeout_s = self._config.worker.start_timeout_s
        starting = asyncio.create_task(_load(engine), name="engine start")
        gone = asyncio.create_task(transfer.gone.wait(), name="transfer gone")
        try:
            await asyncio.wait(
                [starting, gone], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if starting.done():
                return starting.result()
        except EngineDead as error:
            raise WorkerFailed(f"engine: {error}") from None
        finally:
            starting.cancel()
            gone.cancel()
            await asyncio.gather(starting, gone, return_exceptions=True)
        if transfer.gone.is_set():
            raise WorkerFailed(transfer.gone_reason)
        raise WorkerFailed(f"engine: not ready after worker.start_timeout_s {timeout_s:g}")

    def _record_startup(self, stage: str, begun_at: float, ended_at: float | None = None) -> None:
        ended_at = monotonic() if ended_at is None else ended_at
        self._startup_ms[stage] = max(0, round((ended_at - begun_at) * 1e3))


async def _load(engine: Engine) -> tuple[EngineInfo, list[EngineStep]]:
    info = await engine.start()
    return info, await warm_up(engine, info)


def _with_revision(info: EngineInfo, revision: str) -> EngineInfo:
    """Adds the revision to the fingerprint, so that other revisions refuse this KV cache."""
    if revision == FIRST_REVISION:
        return info
    layout = replace(info.layout, revision=f"{info.layout.revision}/{revision}")
    return replace(info, layout=layout)


def _digest(config: BatonConfig, pool: PoolConfig) -> str:
    """Hash of the engine, the model and the engine arguments."""
    settings = [config.engine, config.model, config.engine_args_of(pool)]
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _host_id() -> str:
    """ID that is equal for processes that share memory: the kernel's boot ID and its shm mount."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return f"{boot_id}:{os.stat('/dev/shm').st_dev}"
