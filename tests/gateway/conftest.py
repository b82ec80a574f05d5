"""Gateways in the test's own loop, in front of a real cluster or of a scripted coordinator."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from baton.cli.gateway import bind
from baton.gateway import connections, server
from baton.runtime.config import HttpConfig

# With import-mode=importlib a folder's helper modules are not importable by themselves.
sys.path.append(str(Path(__file__).parents[1] / "cluster"))
sys.path.append(str(Path(__file__).parents[1] / "client"))

from cluster_fixtures import cluster, model, shared_cluster
from processes import Cluster
from scripted_inference import ScriptedInference, serving

__all__ = ["cluster", "model", "shared_cluster"]

WAIT_S = 30.0


@dataclass(frozen=True)
class Running:
    """A gateway: its URL, the connections it accepted, and what stops it."""

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
        options = {"max_retries": 0, "timeout": WAIT_S, **options}
        # To read which authorities it would trust takes long, and none is asked for a certificate.
        http = DefaultAsyncHttpxClient(verify=False)
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", http_client=http, **options)


@asynccontextmanager
async def running(*addresses: str, **limits) -> AsyncIterator[Running]:
    """One in front of as many cells as there are addresses."""
    accepted: list[connections.Connection] = []

    class Seen(connections.Connection):
        def connection_made(self, transport):
            accepted.append(self)
            super().connection_made(transport)

    listener, url = bind("127.0.0.1:0")
    ready, stop = asyncio.Event(), asyncio.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "Connection", Seen)
        # The heap is that of all tests: to look through it takes longer than most of them.
        patch.setattr(server, "frozen_heap", nullcontext)
        config = HttpConfig(**{"drain_timeout_s": 5.0, **limits})
        places = [server.CellEndpoints([address]) for address in addresses]
        task = asyncio.create_task(
            server.serve(config, places, listener, ready=ready.set, stop=stop)
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
    """The address of a coordinator whose answers the test writes."""
    async with serving(inference) as (address, _):
        yield address


@pytest.fixture
async def scripted(coordinator: str) -> AsyncIterator[Running]:
    async with running(coordinator) as gateway:
        yield gateway


@pytest.fixture
def start_gateway():
    return running
