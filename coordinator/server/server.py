"""The coordinator process: starts all parts in order and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from grpc_health.v1 import health_pb2

from baton.coordinator.core.core import Core
from baton.coordinator.launchers.launch_supervisor import LaunchSupervisor
from baton.coordinator.launchers.launcher import BATON
from baton.coordinator.launchers.launchers import make_launcher
from baton.coordinator.server import attach, inference, metrics
from baton.coordinator.server.admin import AdminService
from baton.coordinator.server.attach import ClusterService
from baton.coordinator.server.inference import InferenceService
from baton.coordinator.server.intake import Intake
from baton.coordinator.server.link import ENVELOPE_BYTES
from baton.coordinator.server.message_limits import max_command_bytes
from baton.coordinator.server.shell import Shell
from baton.coordinator.server.status import SAMPLE_S
from baton.coordinator.state import events as ev
from baton.coordinator.state.config import CoreConfig
from baton.coordinator.state.pools import Pool
from baton.coordinator.state.scaling_config import check_sizes
from baton.runtime import demo_model
from baton.runtime.config import BatonConfig, exposure
from baton.runtime.errors import RESTARTING, BatonError, Unavailable
from baton.runtime.network import rpc
from baton.runtime.network.addresses import is_wildcard, joined, outward_address
from baton.runtime.process.lifecycle import draining, frozen_heap, stop_requested
from baton.runtime.process.long_tasks import keep_running
from baton.runtime.prompts.tokenization import Tokenizer
from baton.runtime.security.access import Access
from baton.runtime.security.dial import within_cluster
from baton.runtime.security.refusals import Refusals
from baton.runtime.telemetry import tracing
from baton.runtime.telemetry.metrics import MetricsServer
from baton.runtime.telemetry.tracing import Tracing
from baton.v1 import admin_pb2_grpc

_log = logging.getLogger(__name__)

_INFERENCE = "baton.v1.Inference"
_SERVICES = (_INFERENCE, "baton.v1.Admin", "baton.v1.Cluster")
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Time for clients to read their last events after the requests have ended.
_CLOSE_GRACE_S = 1.0


def _restarting() -> Unavailable:
    why = "the coordinator is restarting: resume with the tokens received"
    return Unavailable(why, reason=RESTARTING)


class WorkersFailed(BatonError):
    """Launched workers cannot serve; the message says which workers and why."""


class Coordinator:
    """The coordinator's servers, as an async context manager.

    Args:
        config: Effective configuration.
        launched: Whether this process also starts the workers.

    Attributes:
        address: host:port of the gRPC server; set on entering.
        metrics_address: host:port of the Prometheus endpoint; set on entering.

    Raises:
        ConfigError: On entering: the model does not exist, an address is in use, a listener is open
            to other hosts without access control, or files of `security` cannot be used.
    """

    address: str
    metrics_address: str

    def __init__(self, config: BatonConfig, *, launched: bool = False) -> None:
        self._config, self._launched = config, launched
        self.shell = Shell(
            Core(CoreConfig.of(config)), config.images.max_held_bytes, max_command_bytes(config)
        )
        self._members_changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Coordinator:
        tracing.require(self._config.tracing)
        coordinator, security = self._config.coordinator, self._config.security
        exposure.check_coordinator(coordinator.listen, security)
        exposure.check_metrics("coordinator.metrics_listen", coordinator.metrics_listen, security)
        refusals = Refusals()
        self._access = Access(security, refusals)
        if self._launched:
            # Checks the workers' security files before the workers start.
            within_cluster(security, with_tls=security.dials_tls)
        model = demo_model.ensure(self._config.model, weights=False)
        async with contextlib.AsyncExitStack() as cleanup:
            # In a thread, because this may download the model.
            self._tokenizer = await asyncio.to_thread(Tokenizer, model)
            cleanup.callback(self._tokenizer.close)
            if self._launched:
                check_sizes(self._config)
            # A worker that attaches during the start sets the shell's timer.
            cleanup.callback(self.shell.close)
            self._tracing = Tracing(self._config.tracing, {"baton.process": "coordinator"})
            cleanup.push_async_callback(asyncio.to_thread, self._tracing.close)
            self.shell.tracing = self._tracing
            registry = metrics.registry(self.shell.core, self._config)
            registry.register(refusals)
            self._metrics = MetricsServer(
                coordinator.metrics_listen,
                "coordinator.metrics_listen",
                registry,
                security,
                refusals,
            )
            cleanup.push_async_callback(asyncio.to_thread, self._metrics.close)
            await self._start_server(model, cleanup)
            cleanup.pop_all()
        return self

    async def _start_server(self, model: str, cleanup: contextlib.AsyncExitStack) -> None:
        coordinator = self._config.coordinator
        protection = rpc.Protection.of(self._config.security, self._access, "coordinator.listen")
        # The message limit is larger than the prompt limit, so that the error can name the latter.
        self._server = rpc.server(
            max_message_bytes=max(rpc.MAX_MESSAGE_BYTES, 2 * coordinator.max_prompt_bytes + 2**20),
            max_sent_bytes=max_command_bytes(self._config) + ENVELOPE_BYTES,
            protection=protection,
        )
        cleanup.push_async_callback(self._server.stop, None)
        intake = Intake(
            self.shell.core,
            self._tokenizer,
            self._config,
            model,
            self._access,
            renders=self.shell.renders,
        )
        inference.add_to_server(InferenceService(self.shell, intake, coordinator), self._server)
        admin = AdminService(self.shell, intake, self._config)
        admin_pb2_grpc.add_AdminServicer_to_server(admin, self._server)
        attach.add_to_server(ClusterService(self.shell, coordinator), self._server)
        self._health = rpc.add_health_and_reflection(self._server, _SERVICES)
        self.address = rpc.bind(self._server, coordinator.listen, "coordinator.listen", protection)
        self.metrics_address = self._metrics.address
        await self._server.start()
        for service in ("", "baton.v1.Admin", "baton.v1.Cluster"):
            await self._health.set(service, _SERVING)
        await self._health.set(_INFERENCE, _NOT_SERVING)
        self.shell.watch_members(self._members_changed.set)
        self._tasks = [
            asyncio.create_task(keep_running("health", self._follow_health)),
            asyncio.create_task(keep_running("history", lambda: _record_history(admin))),
        ]

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The exit stack runs all steps, even if one of them is cancelled.
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(asyncio.to_thread, self._tracing.close)
            closing.callback(self._tokenizer.close)
            closing.callback(self.shell.close)
            closing.push_async_callback(self._stop_servers)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _stop_servers(self) -> None:
        if self._launched:
            self.shell.post(ev.ShutdownNow("the coordinator stopped"))
        else:
            self.shell.leave(_restarting())
        await asyncio.gather(
            self._server.stop(_CLOSE_GRACE_S), asyncio.to_thread(self._metrics.close)
        )

    async def drain(self, timeout_s: float) -> None:
        """Stops admission and waits at most `timeout_s` for running requests.

        With launched workers, which end too, the remaining requests fail. Otherwise their workers
        continue them for the next coordinator.
        """
        await self._health.set(_INFERENCE, _NOT_SERVING)
        self.shell.post(ev.AdmissionClosed(restarts=not self._launched))
        if num_requests := self.shell.core.num_requests:
            _log.info(draining(num_requests, timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                await self.shell.idle()
        except TimeoutError:
            _log.warning("requests still run after the drain timeout of %g s", timeout_s)
            if self._launched:
                why = f"the coordinator stopped after {timeout_s:g} s"
                self.shell.post(ev.ShutdownNow(why))

    def drain_workers(self, worker_ids: Iterable[str], timeout_s: float) -> None:
        """Tells workers to finish their requests and leave."""
        for worker_id in worker_ids:
            self.shell.post(ev.DrainRequested(worker_id, timeout_s, "the coordinator stops"))

    async def wait_serving(self, worker_ids: Iterable[str]) -> None:
        """Waits until none of these workers is starting any more."""
        wanted, changed = list(worker_ids), asyncio.Event()
        self.shell.watch_members(changed.set)
        while self.not_serving(wanted):
            changed.clear()
            await changed.wait()

    def not_serving(self, worker_ids: Iterable[str]) -> list[str]:
        """The workers among these that were started and have not attached yet."""
        return [one for one in worker_ids if self.shell.core.scaler.launches.is_starting(one)]

    async def _follow_health(self) -> None:
        told: bool | None = None
        while True:
            self._members_changed.clear()
            if (serving := self.shell.core.can_serve) is not told:
                await self._health.set(_INFERENCE, _SERVING if serving else _NOT_SERVING)
                told = serving
            await self._members_changed.wait()


async def _record_history(admin: AdminService) -> None:
    """Adds a sample to the history of the cell's status every SAMPLE_S seconds."""
    while True:
        admin.sample()
        await asyncio.sleep(SAMPLE_S)


async def serve(
    config: BatonConfig,
    *,
    launch: bool,
    ready: Callable[[str], None],
    listening: Callable[[str], None] | None = None,
    stop: asyncio.Event | None = None,
    command: Sequence[str] = BATON,
) -> int:
    """Runs a coordinator until it is asked to stop.

    Args:
        config: Effective configuration.
        launch: Whether to also start the configured workers with the configured launcher.
        ready: Called once with host:port when requests can be served (without `launch`: when
            workers can attach).
        listening: Called once with host:port when the server accepts connections.
        stop: Event that stops the coordinator; None: SIGINT and SIGTERM stop it.
        command: Command that runs a worker, as in LocalLauncher.

    Returns:
        The exit code: 0 after a requested stop.

    Raises:
        ConfigError: The coordinator cannot start.
        WorkersFailed: A worker ended before all workers served, or the start took too long. All
            workers are ended in either case.
    """
    stop = stop if stop is not None else stop_requested()
    async with frozen_heap(), Coordinator(config, launched=launch) as coordinator:
        addresses = {"grpc": coordinator.address, "metrics": coordinator.metrics_address}
        _log.info("listening", extra=addresses)
        if listening is not None:
            listening(coordinator.address)
        if not launch:
            ready(coordinator.address)
            await stop.wait()
            # 1. Stop admission; wait for running requests. 2. End the streams, close the servers.
            # The workers stay and continue unfinished requests for the next coordinator.
            await coordinator.drain(config.coordinator.drain_timeout_s)
            return 0
        return await _serve_with_workers(coordinator, config, ready, stop, command)


async def _serve_with_workers(
    coordinator: Coordinator,
    config: BatonConfig,
    ready: Callable[[str], None],
    stop: asyncio.Event,
    command: Sequence[str],
) -> int:
    shell = coordinator.shell
    launch_supervisor = shell.launch_supervisor = LaunchSupervisor(shell.post)
    launcher = make_launcher(
        config,
        _dialled(coordinator.address),
        launch_supervisor.on_exit,
        command,
        on_waits=launch_supervisor.on_waits,
    )
    launch_supervisor.use(launcher)
    sizes = {Pool.PREFILL: config.prefill.workers, Pool.DECODE: config.decode.workers}
    try:
        shell.post(ev.LauncherReady(sizes))
        first = shell.core.scaler.launches.worker_ids
        timeout_s = config.worker.start_timeout_s
        if await _wait_until_all_serve(
            coordinator, first, launch_supervisor.first_failure, stop, timeout_s
        ):
            ready(coordinator.address)
            await stop.wait()
        # 1. Stop admission and scaling; wait for running requests.
        await coordinator.drain(config.coordinator.drain_timeout_s)
        # 2. Drain the workers.
        started = shell.core.scaler.launches.worker_ids
        coordinator.drain_workers(started, config.worker.drain_timeout_s)
    finally:
        # 3. Wait for the end of all worker processes. 4. The caller closes the servers.
        await launch_supervisor.close()
    return 0


async def _wait_until_all_serve(
    coordinator: Coordinator,
    worker_ids: Iterable[str],
    failure: asyncio.Future[str],
    stop: asyncio.Event,
    timeout_s: float,
) -> bool:
    """Waits until all workers serve; returns False if a stop was requested first.

    A worker that ends during the start indicates a configuration error, so the start fails. Later,
    a worker that ends is replaced.

    Raises:
        WorkersFailed: A worker ended, or the start took too long.
    """
    serving = asyncio.create_task(coordinator.wait_serving(worker_ids))
    stopped = asyncio.create_task(stop.wait())
    tasks = (serving, stopped)
    try:
        await asyncio.wait(
            (*tasks, failure), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if stopped.done():
            return False
        if failure.done():
            raise WorkersFailed(failure.result())
        if not serving.done():
            launches = coordinator.shell.core.scaler.launches
            waiting = filter(None, (launches.waiting(pool) for pool in Pool))
            late = "; ".join([", ".join(coordinator.not_serving(worker_ids)), *waiting])
            raise WorkersFailed(
                f"not serving after worker.start_timeout_s ({timeout_s:g} s): {late}"
            )
        return True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _dialled(address: str) -> str:
    """The coordinator's address as workers on this host dial it.

    For a wildcard address it is this host's outward address: workers listen on the address by which
    they reach the coordinator, and workers on other hosts must be able to reach them.
    """
    host, _, port = address.rpartition(":")
    if not is_wildcard(host):
        return address
    family, loopback = (socket.AF_INET6, "::1") if ":" in host else (socket.AF_INET, "127.0.0.1")
    return joined(outward_address(family) or loopback, port)
