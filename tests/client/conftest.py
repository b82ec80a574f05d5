"""Fixtures: a scripted coordinator and a client of it.

A busy machine may stop a test for many seconds at any point. Timeouts that a test does not test are
therefore so long that they only bound hangs; a test of a timeout moves the clock with
`scripted_inference.advance_clock`.
"""

import pytest
import pytest_asyncio

from baton.client import BatonClient, BlockingClient, session_manager
from tests.client.scripted_inference import TIMEOUT_S, ScriptedInference, serving


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch):
    """Makes the client's default timeouts so long that a busy machine does not exceed them."""
    for client in (BatonClient, BlockingClient):
        monkeypatch.setitem(client.__init__.__kwdefaults__, "resume_timeout_s", 2 * TIMEOUT_S)
    monkeypatch.setattr(session_manager, "_PING_TIMEOUT_S", TIMEOUT_S)


@pytest_asyncio.fixture
async def inference():
    return ScriptedInference()


@pytest_asyncio.fixture
async def server(inference):
    async with serving(inference) as (address, health):
        yield address, health


@pytest_asyncio.fixture
async def client(server):
    async with BatonClient(server[0]) as client:
        yield client
