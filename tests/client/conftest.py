import sys
from pathlib import Path

import pytest_asyncio

from baton.client import BatonClient

# With import-mode=importlib a folder's helper modules are not importable by themselves.
sys.path.append(str(Path(__file__).parent))

from scripted_inference import ScriptedInference, serving


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
