"""Starts and stops the compared systems: Baton, plain vLLM, vLLM's NixlConnector."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from baton.client.client import BatonClient
from baton.runtime import demo_model
from baton.runtime.process.affinity import VLLM_BIND_THREADS

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
SCRAPE_TIMEOUT_S = 10.0
# Long enough to include the cause of an engine failure, which is logged before its consequences.
LOG_TAIL_CHARS = 8000
# Linux flags of CPUs that multiply bfloat16 in wide registers; "bf16" is the flag of ARM CPUs.
_BFLOAT16_FLAGS = {"avx512f", "bf16"}


@dataclass(frozen=True, slots=True)
class Process:
    """A started server.

    Attributes:
        address: host:port or URL of the server.
        log: File with stdout and stderr of the process.
    """

    popen: subprocess.Popen[str]
    address: str
    log: Path

    def resident_bytes(self) -> dict[str, int]:
        """Returns resident memory of the process and its children by kind, without shared memory.

        Shared memory is left out because three processes of a worker share the staging segment,
        which has a configured size.
        """
        main = psutil.Process(self.popen.pid)
        found: dict[str, int] = {}
        for one in [main, *main.children(recursive=True)]:
            kind = _kind(" ".join(one.cmdline()), one.name())
            found[kind] = found.get(kind, 0) + int(one.memory_info().rss) - _shm_bytes(one.pid)
        return found


def engine_args(model: str, max_num_seqs: int, **more: Any) -> dict[str, Any]:
    """Returns vLLM's engine arguments for a demo model on a CPU.

    The weights are bfloat16, or float32 on CPUs where float32 is several times faster.
    """
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    return {
        "dtype": "bfloat16" if flags & _BFLOAT16_FLAGS else "float32",
        "block_size": 32,
        "max_model_len": demo_model.SHAPES[model].max_model_len,
        "max_num_batched_tokens": 512,
        "max_num_seqs": max_num_seqs,
        "kv_cache_memory_bytes": 512 * 2**20,
        **more,
    }


def _shm_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (kilobytes,) = (line.split()[1] for line in status.splitlines() if "RssShmem" in line)
    return int(kilobytes) * 1024


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def plain(model: str, engine_args: dict[str, Any], cores: str = "") -> Iterator[Process]:
    """Starts one vLLM OpenAI server; `cores` binds an engine on a CPU."""
    with _starting_vllm(model, engine_args, cores) as server:
        _wait_http(server)
        yield server


@contextlib.contextmanager
def plain_pair(
    model: str, engine_args: dict[str, Any], cores: tuple[str, str]
) -> Iterator[tuple[Process, Process]]:
    """Two independent vLLM OpenAI servers, each on its own core."""
    with contextlib.ExitStack() as stack:
        one, other = (
            stack.enter_context(_starting_vllm(model, engine_args, core)) for core in cores
        )
        _wait_http(one)
        _wait_http(other)
        yield one, other


@contextlib.contextmanager
def nixl_pair(
    model: str, engine_args: dict[str, Any], cores: tuple[str, str]
) -> Iterator[tuple[Process, Process]]:
    """Two vLLM servers with the NixlConnector: prefill and decode."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    arguments = engine_args | {"kv_transfer_config": json.dumps(transfer)}
    with contextlib.ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(
                _starting_vllm(model, arguments, core, VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()))
            )
            for core in cores
        )
        _wait_http(prefill)
        _wait_http(decode)
        yield prefill, decode


@contextlib.contextmanager
def _starting_vllm(
    model: str, engine_args: dict[str, Any], cores: str, **environment: str
) -> Iterator[Process]:
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--model", model, "--served-model-name", "bench"]
    for name, value in engine_args.items():
        command += _flag(name, value)
    with _running(command, {VLLM_BIND_THREADS: cores, **environment}) as (popen, log):
        yield Process(popen, f"http://127.0.0.1:{port}", log)


@dataclass(frozen=True, slots=True)
class Baton:
    """The processes of a coordinator and its two workers.

    Attributes:
        metrics_url: URL of the coordinator's metrics.
    """

    coordinator: Process
    prefill: Process
    decode: Process
    metrics_url: str

    async def wait_ready(self, client: BatonClient) -> None:
        """Waits until both workers serve.

        Raises:
            RuntimeError: A worker has ended instead.
        """
        waiting = asyncio.create_task(client.wait_ready(START_TIMEOUT_S))
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=0.5)
            for worker in (self.prefill, self.decode):
                if (code := worker.popen.poll()) is not None:
                    waiting.cancel()
                    raise RuntimeError(f"a worker ended with {code}")
        await waiting

    def handoff_counters(self) -> dict[str, float]:
        """Returns the coordinator's handoff counters since its start, by name and labels."""
        with urllib.request.urlopen(self.metrics_url, timeout=SCRAPE_TIMEOUT_S) as response:
            families = list(text_string_to_metric_families(response.read().decode()))
        return {
            " ".join([sample.name, *(f"{key}={value}" for key, value in sample.labels.items())]): (
                sample.value
            )
            for family in families
            for sample in family.samples
            if family.type == "counter"
            and family.name.startswith("baton_handoff")
            and sample.name.endswith("_total")
        }


@contextlib.contextmanager
def baton(
    model: str,
    engine_args: dict[str, Any],
    cores: tuple[str, str],
    settings: Mapping[str, Any] | None = None,
) -> Iterator[Baton]:
    """Starts one coordinator, one prefill and one decode worker.

    Args:
        model: Path of the model.
        engine_args: Arguments of vLLM.
        cores: Core of the prefill worker, core of the decode worker.
        settings: Further configuration sections.
    """
    port, metrics = free_port(), f"127.0.0.1:{free_port()}"
    config = {
        "model": model,
        "served_model_name": "bench",
        "engine_args": engine_args,
        "log_level": "warning",
        "coordinator": {"listen": f"127.0.0.1:{port}", "metrics_listen": metrics},
        # As in `baton up`, the transfer services do not run on the core of the prefill worker.
        "kv_transfer": {"cpus": [int(cores[1])]},
        **(settings or {}),
    }
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        path = Path(directory) / "baton.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")

        def start(arguments: list[str], **environment: str) -> Process:
            command = [sys.executable, "-m", "baton.cli.main", *arguments, "--config", str(path)]
            popen, log = stack.enter_context(_running(command, environment))
            return Process(popen, f"127.0.0.1:{port}", log)

        coordinator = start(["coordinator"])
        prefill, decode = (
            start(
                ["worker", "--role", role, "--coordinator", f"127.0.0.1:{port}"],
                **{VLLM_BIND_THREADS: core},
            )
            for role, core in zip(("prefill", "decode"), cores, strict=True)
        )
        yield Baton(coordinator, prefill, decode, f"http://{metrics}/metrics")


@contextlib.contextmanager
def coordinator(config: dict[str, Any]) -> Iterator[Process]:
    """Starts only a coordinator, on a free port; the caller starts workers and clients."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "baton.yaml"
        path.write_text(
            yaml.safe_dump({**config, "coordinator": {"listen": address}}), encoding="utf-8"
        )
        with module("baton.cli.main", ["coordinator", "--config", str(path)]) as process:
            yield Process(process.popen, address, process.log)


@contextlib.contextmanager
def module(name: str, arguments: list[str]) -> Iterator[Process]:
    """Runs a Python module as a process."""
    with _running([sys.executable, "-m", name, *arguments], {}) as (popen, log):
        yield Process(popen, "", log)


@contextlib.contextmanager
def command(arguments: list[str], **environment: str) -> Iterator[Process]:
    """Runs a program of another project, without this checkout in its module path."""
    with _running(arguments, {"PYTHONPATH": "", **environment}) as (popen, log):
        yield Process(popen, "", log)


@contextlib.contextmanager
def code(text: str) -> Iterator[None]:
    """Runs Python code as a process."""
    with _running([sys.executable, "-c", text], {}):
        yield


@contextlib.contextmanager
def _running(
    command: list[str], environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".log", delete=False) as log:
        popen = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
            process_group=0,
        )
    try:
        yield popen, Path(log.name)
    except BaseException:
        sys.stderr.write(f"{' '.join(command[:6])}:\n{_tail(Path(log.name))}\n")
        raise
    finally:
        stop(popen)
        os.unlink(log.name)


def _kind(command: str, name: str) -> str:
    if "EngineCore" in command:
        return "engine core"
    if "VLLM::Worker" in command or "Worker" in name:
        return "rank"
    if "kvtransfer.service" in command:
        return "transfer service"
    if "resource_tracker" in command:
        return "resource tracker"
    return "main"


def stop(
    popen: subprocess.Popen[Any],
    how: signal.Signals = signal.SIGTERM,
    timeout_s: float = STOP_TIMEOUT_S,
) -> None:
    """Stops a process if it still runs, and ends all that it has started.

    Args:
        popen: The process.
        how: The signal after which it ends by itself.
        timeout_s: Seconds until it is killed.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        # They may have process groups of their own.
        children = psutil.Process(popen.pid).children(recursive=True)
        popen.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(timeout_s)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, 5)
    if popen.poll() is None:
        popen.kill()
        popen.wait()


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARS:]


def _wait_http(server: Process) -> None:
    url, deadline = f"{server.address}/health", time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (code := server.popen.poll()) is not None:
            raise RuntimeError(f"server ended with {code}: {_tail(server.log)}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"{url} did not answer within {START_TIMEOUT_S:.0f} s")


def _flag(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if value is False:
        return [f"--no-{flag.removeprefix('--')}"]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
