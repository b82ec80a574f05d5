"""Starts and stops what the benchmarks compare: Baton, one plain vLLM, vLLM's NixlConnector."""

from __future__ import annotations

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

from baton.runtime import demo_model
from baton.runtime.affinity import VLLM_BIND_THREADS

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
SCRAPE_TIMEOUT_S = 10.0
# An engine that dies says why before it says what that broke.
LOG_TAIL_CHARS = 8000
# Of CPUs that multiply bfloat16 in wide registers, by their flags in Linux; "bf16" is ARM's.
_BFLOAT16_FLAGS = {"avx512f", "bf16"}


@dataclass(frozen=True, slots=True)
class Process:
    """A started server.

    Attributes:
        address: host:port or URL of what it serves.
    """

    popen: subprocess.Popen[str]
    address: str
    log: Path

    def resident_bytes(self) -> dict[str, int]:
        """Of it and of each process below it, by what they are; without memory they share.

        Staging is shared by three processes of a worker and is as large as configured.
        """
        main = psutil.Process(self.popen.pid)
        found: dict[str, int] = {}
        for one in [main, *main.children(recursive=True)]:
            kind = _kind(" ".join(one.cmdline()), one.name())
            found[kind] = found.get(kind, 0) + int(one.memory_info().rss) - _shm_bytes(one.pid)
        return found


def engine_args(model: str, max_num_seqs: int, **more: Any) -> dict[str, Any]:
    """Of vLLM on a CPU, for a demo model.

    Its weights are bfloat16, and float32 where that is several times as fast.
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
def plain_vllm(model: str, engine_args: dict[str, Any], cores: str) -> Iterator[Process]:
    """One vLLM OpenAI server bound to `cores`."""
    with _starting_vllm(model, engine_args, cores) as server:
        _wait_http(server)
        yield server


@contextlib.contextmanager
def plain_pair(
    model: str, engine_args: dict[str, Any], cores: tuple[str, str]
) -> Iterator[tuple[Process, Process]]:
    """Two vLLM OpenAI servers that know nothing of each other, each on its core."""
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
    """A coordinator and its workers, each a process of its own.

    Attributes:
        metrics_url: of the coordinator.
    """

    coordinator: Process
    prefill: Process
    decode: Process
    metrics_url: str

    def handoff_counters(self) -> dict[str, float]:
        """The coordinator's counters of handoffs since it started, by name and labels."""
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
    """One coordinator, one prefill and one decode worker.

    Args:
        settings: whole sections of the configuration, beside these.
    """
    port, metrics = free_port(), f"127.0.0.1:{free_port()}"
    config = {
        "model": model,
        "served_model_name": "bench",
        "engine_args": engine_args,
        "log_level": "warning",
        "coordinator": {"listen": f"127.0.0.1:{port}", "metrics_listen": metrics},
        # As `baton up` does: off the core that prefills.
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
    """A coordinator alone, on a free port: the caller brings workers and clients."""
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
    """A program of this package."""
    with _running([sys.executable, "-m", name, *arguments], {}) as (popen, log):
        yield Process(popen, "", log)


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
        _stop(popen)
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


def _stop(popen: subprocess.Popen[str]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(popen.pid).children(recursive=True)
        popen.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(STOP_TIMEOUT_S)
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
    return [flag, str(value)]
