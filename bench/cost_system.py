"""Starts a coordinator, a gateway and a scripted worker; measures CPU, memory and latencies."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from baton.bench import systems
from baton.bench.coordinator_cost import pinned, ready
from baton.bench.cost_answers import MODEL
from baton.bench.cost_client import Client, Seen, SessionClient
from baton.bench.cost_http import HttpClient, HttpRoute
from baton.load import stats
from baton.runtime import demo_model
from baton.runtime.security import dev_certs
from baton.runtime.security.dial import PLAIN, Dial
from baton.runtime.security.tls import TlsFiles


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one run.

    Attributes:
        num_requests: Requests at a time.
        num_prompt_tokens, num_tokens: Prompt and output tokens of each request.
        step_ms: Time between two tokens of a stream.
    """

    num_requests: int
    num_prompt_tokens: int
    num_tokens: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class System:
    """The serving processes; an empty `ca_file` means no TLS."""

    coordinator: systems.Process
    gateway: systems.Process
    worker: systems.Process
    url: str
    ca_file: str

    @property
    def pids(self) -> tuple[int, int, int]:
        """Process IDs of the gateway, the coordinator and the worker."""
        return self.gateway.popen.pid, self.coordinator.popen.pid, self.worker.popen.pid

    def client(self, load: Load, *, route: HttpRoute | None, traced: bool) -> Client:
        """Returns a client for a route, or for gRPC; `traced` requests carry a traceparent."""
        if route is not None:
            context = ssl.create_default_context(cafile=self.ca_file) if self.ca_file else None
            return HttpClient(
                self.url,
                load.num_prompt_tokens,
                load.num_tokens,
                context,
                route=route,
                traced=traced,
            )
        dial = Dial(TlsFiles(self.ca_file)) if self.ca_file else PLAIN
        return SessionClient(
            self.coordinator.address,
            load.num_requests,
            load.num_prompt_tokens,
            load.num_tokens,
            dial,
            traced=traced,
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run, or medians of several runs.

    Attributes:
        gateway_cpu_ms, coordinator_cpu_ms: CPU milliseconds per 1,000 tokens.
        others: Cores used by processes outside this benchmark.
    """

    tokens_per_s: float
    gateway_cpu_ms: float
    coordinator_cpu_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    gateway_mb: float
    others: float


class Meter:
    """Measures CPU time and latencies from its creation until `stop`.

    Args:
        client: The client; its `seen` is reset.
        system: The processes that serve the client.
        idle: IDs of other processes of this benchmark, which are almost idle.
    """

    def __init__(self, client: Client, system: System, idle: Sequence[int]) -> None:
        self._client = client
        pids = (*system.pids, os.getpid(), *idle)
        self._processes = [psutil.Process(one) for one in pids]
        client.seen = Seen()
        self._began_at = time.perf_counter()
        self._before = self._used_s()

    def stop(self) -> Figures:
        elapsed_s = time.perf_counter() - self._began_at
        all_s, *own_s = (
            now - before for now, before in zip(self._used_s(), self._before, strict=True)
        )
        seen = self._client.seen
        num_tokens = max(1, seen.num_tokens)
        return Figures(
            tokens_per_s=seen.num_tokens / elapsed_s,
            gateway_cpu_ms=own_s[0] * 1e6 / num_tokens,
            coordinator_cpu_ms=own_s[1] * 1e6 / num_tokens,
            ttft_p50_ms=stats.percentile(seen.ttfts_s, 50) * 1e3,
            ttft_p99_ms=stats.percentile(seen.ttfts_s, 99) * 1e3,
            itl_p50_ms=stats.percentile(seen.gaps_s, 50) * 1e3,
            itl_p99_ms=stats.percentile(seen.gaps_s, 99) * 1e3,
            gateway_mb=self._processes[0].memory_info().rss / 1e6,
            others=max(0.0, all_s - sum(own_s)) / elapsed_s,
        )

    def _used_s(self) -> list[float]:
        """Returns CPU seconds of all processes of the machine, then of each own process."""
        everything = psutil.cpu_times()
        found = [sum(everything) - everything.idle - everything.iowait]
        for process in self._processes:
            times = process.cpu_times()
            found.append(float(times.user + times.system))
        return found


@contextlib.asynccontextmanager
async def spans_sink() -> AsyncIterator[tuple[str, int]]:
    """Starts a receiver of spans; yields its URL for `tracing.otlp_endpoint` and its process ID."""
    with systems.module("baton.bench.otlp_sink", []) as sink:
        yield f"http://{await _ready_detail(sink)}", sink.popen.pid


@contextlib.asynccontextmanager
async def serving(load: Load, cores: set[int], sections: dict[str, Any]) -> AsyncIterator[System]:
    """Starts coordinator, gateway and worker.

    Args:
        load: The expected load.
        cores: Cores of the gateway.
        sections: Configuration sections `security` and `tracing`, and `tool_call_parser`.
    """
    model = demo_model.ensure("demo", weights=False)
    config = {
        "model": model,
        "served_model_name": MODEL,
        "engine": "simulated",
        "log_level": "warning",
        "prefill": {"max_requests_per_worker": load.num_requests},
        # Every request has a handoff.
        "elastic": False,
        "decode": {"max_requests_per_worker": load.num_requests},
        **sections,
    }
    security: dict[str, str] = sections.get("security", {})
    ca_file = security.get("ca_file", "")
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(systems.coordinator(config))
        await ready(coordinator)
        arguments = ["--tokens", f"{load.num_tokens}", "--step-ms", f"{load.step_ms}"]
        arguments += ["--coordinator", coordinator.address, "--tls-ca", ca_file]
        arguments += ["--requests", f"{load.num_requests}", "--tokenizer", model]
        worker = stack.enter_context(systems.module("baton.bench.cost_worker", arguments))
        await ready(worker)
        file = stack.enter_context(
            tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml")
        )
        parser = sections.get("tool_call_parser", "")
        yaml.safe_dump({"security": security, "tool_call_parser": parser}, file)
        file.flush()
        arguments = ["gateway", "--coordinator", coordinator.address]
        arguments += ["--listen", "127.0.0.1:0", "--config", file.name]
        with pinned(cores):
            gateway = stack.enter_context(systems.module("baton.cli.main", arguments))
        url = (await _ready_detail(gateway)).removeprefix("http=")
        yield System(coordinator, gateway, worker, url, ca_file)


async def _ready_detail(process: systems.Process) -> str:
    """Waits until the process has logged "ready" and returns the word after it."""
    await ready(process)
    found = re.search(r"ready (\S+)", process.log.read_text(encoding="utf-8", errors="replace"))
    assert found is not None
    return found[1]


def certificates(directory: str) -> dict[str, str]:
    """Creates certificates in `directory` and returns a `security` section that names them."""
    dev_certs.make(directory)
    names = {"ca_file": "ca.pem", "cert_file": "server.pem", "key_file": "server.key"}
    return {key: str(Path(directory) / name) for key, name in names.items()}
