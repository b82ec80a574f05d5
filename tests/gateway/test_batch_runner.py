"""Lines of batches run on routes of the test, with a real database."""

import asyncio
import contextlib
import json
import time

import pytest
from openai.types import FileObject

from baton.gateway.batches.batch_store import NewBatch
from baton.gateway.batches.database import Database
from baton.gateway.batches.runner import BatchRunner
from baton.gateway.metrics import BatchStats
from baton.runtime.config import HttpConfig

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
OWNER, WAIT_S = b"me", 60.0


@contextlib.asynccontextmanager
async def running(directory, route, **limits):
    """A runner whose routes are all the ASGI application `route`."""
    config = HttpConfig(batches={"dir": str(directory), **limits})
    with Database(str(directory)) as database:
        routes = {COMPLETIONS: route, MESSAGES: route}
        runner = BatchRunner(database, routes, config, BatchStats(), time.time)
        async with runner:
            yield runner


async def submit(runner, *names, endpoint=COMPLETIONS, owner=OWNER):
    """Starts a batch with a line of each name; returns its ID."""
    lines = (
        {"custom_id": name, "method": "POST", "url": endpoint, "body": {"name": name}}
        for name in names
    )
    data, now = b"\n".join(json.dumps(one).encode() for one in lines), runner.now()

    def create():
        file = FileObject(
            id=runner.files.begin_upload(),
            object="file",
            bytes=len(data),
            created_at=now,
            expires_at=now + 1000,
            filename="a",
            purpose="batch",
            status="processed",
        )
        runner.files.add_chunk(file.id, 0, data)
        runner.files.finish_upload(owner, file)
        return runner.batches.create(NewBatch(owner, "", "", endpoint, file.id, None, 1000), now)

    batch = await runner.thread.call(create)
    runner.start(batch)
    return batch.id


async def ended(runner, batch_id, owner=OWNER):
    async with asyncio.timeout(WAIT_S):
        while True:
            batch = await runner.thread.call(runner.batches.find, owner, batch_id)
            if batch.status in ("failed", "completed", "expired", "cancelled"):
                return batch


async def results(runner, file_id):
    """The responses in a file by the name of their line."""
    part = await runner.thread.call(runner.files.read, OWNER, file_id, 0)
    found = map(json.loads, part.data.splitlines())
    return {one["custom_id"]: one["response"] for one in found}


async def name_in(receive):
    return json.loads((await receive())["body"])["name"]


async def reply(send, body=b"{}"):
    headers = [(b"content-type", b"application/json"), (b"x-request-id", b"req_1")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("endpoint", [COMPLETIONS, MESSAGES])
async def test_a_line_whose_route_raises_fails_alone(tmp_path, endpoint):
    async def route(scope, receive, send):
        name = await name_in(receive)
        if name == "raises":
            raise RuntimeError("of this test")
        if name == "silent":
            return
        await reply(send)

    async with running(tmp_path, route, max_running=2) as runner:
        names = ("a", "raises", "b", "silent", "c")
        batch = await ended(runner, await submit(runner, *names, endpoint=endpoint))
        counts = batch.request_counts
        assert (batch.status, counts.completed, counts.failed) == ("completed", 3, 2)
        assert set(await results(runner, batch.output_file_id)) == {"a", "b", "c"}
        wrong = await results(runner, batch.error_file_id)
        assert set(wrong) == {"raises", "silent"}
        for found in wrong.values():
            assert found["status_code"] == 500
            assert found["request_id"].startswith("req_")
            assert found["body"]["error"]["message"] == "internal error"
            assert found["body"].get("type") == ("error" if endpoint == MESSAGES else None)
