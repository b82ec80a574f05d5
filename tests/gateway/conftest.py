"""Gateways in the test's own loop, in front of a real cluster or of a scripted coordinator.

A busy machine may stop a test for many seconds at any point. Timeouts that a test does not test are
therefore so long that they only bound hangs.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from urllib.parse import urlsplit

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from baton.cli.gateway import bind
from baton.client import session_manager
from baton.client.watcher import Watcher
from baton.gateway import body_reader, cell, connections, coordinator_queries, server
from baton.runtime.config import HttpConfig
from tests.client.scripted_inference import ScriptedInference, serving
from tests.cluster.cluster_fixtures import cluster, model, shared_cluster
from tests.cluster.processes import Cluster

__all__ = ["cluster", "model", "shared_cluster"]

# Bounds hangs. No test may fail because a busy machine is slow.
WAIT_S = 300.0


@dataclass(frozen=True)
class Running:
    """A gateway: its URL, the connections it has accepted, and the event that stops it."""

    url: str
    accepted: list[connections.Connection]
    stop: asyncio.Event
    serving: "asyncio.Task[int]"

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def openai(self, **options) -> AsyncOpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": WAIT_S, **options}
        # verify=False: reading the system's certificate authorities takes long; no test uses TLS.
        http = DefaultAsyncHttpxClient(verify=False)
        return AsyncOpenAI(base_url=f"{self.url}/v1", http_client=http, **options)


@asynccontextmanager
async def running(
    *addresses: str,
    query_timeout_s: float = WAIT_S,
    resume_timeout_s: float = 2 * WAIT_S,
    clock: Callable[[], float] = time.time,
    **limits,
) -> AsyncIterator[Running]:
    """Runs a gateway in front of one cell per address.

    Args:
        addresses: Addresses of the cells' coordinators.
        query_timeout_s: Longest wait for a coordinator's model description or health.
        resume_timeout_s: Longest wait of a request that has lost its coordinator.
        clock: Time of files and batches.
        limits: Fields of HttpConfig.
    """
    accepted: list[connections.Connection] = []

    class Seen(connections.Connection):
        def connection_made(self, transport):
            accepted.append(self)
            super().connection_made(transport)

    listener, url = bind("127.0.0.1:0")
    ready, stop = asyncio.Event(), asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "Connection", Seen)
        patch.setattr(cell, "_QUERY_TIMEOUT_S", query_timeout_s)
        patch.setattr(coordinator_queries, "_QUEUE_TIMEOUT_S", WAIT_S)
        patch.setattr(session_manager, "_PING_TIMEOUT_S", WAIT_S)
        patch.setitem(Watcher.__init__.__kwdefaults__, "timeout_s", WAIT_S)
        for module in (body_reader, connections):
            patch.setattr(module, "LINGER_S", WAIT_S)
        # The heap belongs to all tests: scanning it takes longer than most of them.
        patch.setattr(server, "frozen_heap", nullcontext)
        long = {"read_timeout_s": WAIT_S, "write_timeout_s": WAIT_S}
        config = HttpConfig(**{"drain_timeout_s": 5.0, **long, **limits})
        places = [server.CellEndpoints([address]) for address in addresses]
        task = asyncio.create_task(
            server.serve(
                config,
                places,
                listener,
                ready=ready.set,
                resume_timeout_s=resume_timeout_s,
                stop=stop,
                clock=clock,
            )
        )
        await asyncio.wait_for(ready.wait(), WAIT_S)
        try:
            yield Running(url, accepted, stop, task)
        finally:
            stop.set()
            assert await task == 0


@pytest.fixture
async def gateway(cluster: Cluster) -> AsyncIterator[Running]:
    async with running(cluster.address) as gateway:
        yield gateway


@pytest.fixture
async def openai(gateway: Running) -> AsyncIterator[AsyncOpenAI]:
    async with gateway.openai() as client:
        yield client


@pytest.fixture
async def inference() -> ScriptedInference:
    return ScriptedInference()


@pytest.fixture
async def coordinator(inference: ScriptedInference) -> AsyncIterator[str]:
    """The address of a coordinator whose events the test sends."""
    async with serving(inference) as (address, _):
        yield address


@pytest.fixture
async def scripted(coordinator: str) -> AsyncIterator[Running]:
    async with running(coordinator) as gateway:
        yield gateway


@pytest.fixture
def start_gateway():
    return running
