"""A profile of a live vLLM worker shows its rank's work, and the worker continues to serve."""

from __future__ import annotations

import asyncio
import gzip
import json
import tempfile
from pathlib import Path

import pytest

from baton.client.admin import AdminClient
from baton.client.client import BatonClient
from tests.vllm import vllm_cases as cases
from tests.vllm.vllm_cluster import Cluster

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


def left_behind() -> list[Path]:
    return [path for path in Path(tempfile.gettempdir()).glob("baton-*/traces/*") if path.is_file()]


async def test_a_rank_is_recorded_while_it_serves(client: BatonClient, cluster: Cluster) -> None:
    prompt = cases.prompt(60, 7100)
    calm = await client.complete(prompt, temperature=0, max_tokens=40, ignore_eos=True)
    recording, data = asyncio.Event(), bytearray()

    async def record() -> None:
        async with AdminClient(cluster.address) as admin:
            async for event in admin.profile("decode-0", 1.0):
                recording.set()
                data.extend(event.data)

    task = asyncio.create_task(record())
    await asyncio.wait(
        [task, wait := asyncio.create_task(recording.wait())], return_when="FIRST_COMPLETED"
    )
    wait.cancel()
    answer = await client.complete(prompt, temperature=0, max_tokens=40, ignore_eos=True)
    await task
    assert answer.token_ids == calm.token_ids
    trace = json.loads(gzip.decompress(bytes(data)))
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"aten::linear", "aten::embedding"} & names
    # vLLM marks each step with its content.
    assert [name for name in names if name.startswith("execute_")]
    # The recording has ended, and a new one can start.
    assert left_behind() == []
    async with AdminClient(cluster.address) as admin:
        again = [event.WhichOneof("event") async for event in admin.profile("decode-0", 1.0)]
    assert again[:2] == ["started", "file"]
    assert left_behind() == []
    await cluster.assert_idle()
