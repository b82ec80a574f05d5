"""Lines of batches run on routes of the test, with a real database."""

import asyncio
import contextlib
import json
import threading
import time
from collections import defaultdict

import pytest
from openai.types import FileObject

from baton.gateway.anthropic_route import Messages
from baton.gateway.batches import runner as runner_module
from baton.gateway.batches.batch_store import NewBatch
from baton.gateway.batches.database import Database
from baton.gateway.batches.file_store import FileStore, new_id
from baton.gateway.batches.runner import BatchRunner
from baton.gateway.batches.status import Status
from baton.gateway.metrics import BatchStats
from baton.gateway.openai_dialects import Completions
from baton.runtime.config import HttpConfig

COMPLETIONS, MESSAGES = "/v1/completions", "/v1/messages"
OWNER, WAIT_S = b"me", 60.0


class Endpoint:
    """The endpoint of a generation route that a function of the test serves."""

    def __init__(self, dialect, route):
        self.dialect, self._route = dialect, route

    async def __call__(self, scope, receive, send):
        await self._route(scope, receive, send)


@contextlib.asynccontextmanager
async def running(directory, route, stats=None, prepare=None, **limits):
    """A runner whose routes are all `route`; `prepare` changes the database first."""
    config = HttpConfig(batches={"dir": str(directory), **limits})
    with Database(str(directory)) as database:
        if prepare is not None:
            with database.transaction() as db:
                prepare(db)
        routes = {
            COMPLETIONS: Endpoint(Completions(), route),
            MESSAGES: Endpoint(Messages(10_000), route),
        }
        runner = BatchRunner(database, routes, config, stats or BatchStats(), time.time)
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
        file_id = new_id("files")
        runner.files.begin_upload(file_id, owner, len(data))
        file = FileObject(
            id=file_id,
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
        new = NewBatch(owner, "", "", endpoint, file_id, len(data), None, 1000)
        return runner.batches.create(new, now)

    batch = await runner.thread.call(create)
    runner.start(batch)
    return batch.id


async def ended(runner, batch_id, owner=OWNER):
    async with asyncio.timeout(WAIT_S):
        while True:
            batch = await runner.thread.call(runner.batches.find, owner, batch_id)
            if batch.status in ("failed", "completed", "expired", "cancelled"):
                return batch


async def cancelled(runner, batch_id):
    await runner.thread.call(runner.batches.begin_cancel, batch_id, runner.now())
    runner.end(batch_id, Status.CANCELLED)
    return await ended(runner, batch_id)


async def results(runner, file_id):
    """The responses in a file by the name of their line."""
    part = await runner.thread.call(runner.files.read, OWNER, file_id, 0)
    found = map(json.loads, part.data.splitlines())
    return {one["custom_id"]: one["response"] for one in found}


def num_chunks(runner):
    with runner.files._database.transaction() as db:
        return db.execute("SELECT count(*) FROM chunks").fetchone()[0]


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


async def test_reading_the_input_goes_on_when_there_is_room_again(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "_RETRY_S", 0.0)
    is_full = iter([True, False, True, True])
    monkeypatch.setattr(FileStore, "is_full_for", lambda *_: next(is_full, False))

    async def route(scope, receive, send):
        await reply(send)

    async with running(tmp_path, route) as runner:
        batch = await ended(runner, await submit(runner, "a", "b"))
        assert (batch.status, batch.request_counts.completed) == ("completed", 2)


async def test_chunks_without_a_file_go_when_the_disk_lets_them(tmp_path, monkeypatch):
    """A gateway was killed during an upload, and the disk is full when it starts again."""
    monkeypatch.setattr(runner_module, "_RETRY_S", 0.0)
    tries = []

    def fail():
        tries.append(None)
        if len(tries) < 3:
            raise OSError("the disk is full")

    def prepare(db):
        db.create_function("fail", 0, fail)
        db.execute("INSERT INTO chunks VALUES ('file-a', 0, 'x')")
        db.execute("CREATE TEMP TRIGGER failing BEFORE DELETE ON chunks BEGIN SELECT fail(); END")

    async with running(tmp_path, None, prepare=prepare) as runner:
        async with asyncio.timeout(WAIT_S):
            while len(tries) < 3:
                await asyncio.sleep(0)
            assert await runner.thread.call(num_chunks, runner) == 0


class Held:
    """A route that answers a line when the test lets it."""

    def __init__(self):
        self.begun, self.released = defaultdict(asyncio.Event), defaultdict(asyncio.Event)

    async def __call__(self, scope, receive, send):
        name = await name_in(receive)
        self.begun[name].set()
        await self.released[name].wait()
        await reply(send)

    async def until_begun(self, name):
        await asyncio.wait_for(self.begun[name].wait(), WAIT_S)


def calling(fail):
    """Returns a preparation of the database that calls a function when a line changes."""

    def prepare(db):
        db.create_function("fail", 1, fail)
        db.execute(
            "CREATE TEMP TRIGGER failing BEFORE UPDATE ON lines "
            "BEGIN SELECT fail(NEW.custom_id); END"
        )

    return prepare


async def test_a_batch_stops_although_its_lines_are_being_cancelled_already(tmp_path, monkeypatch):
    monkeypatch.setattr(runner_module, "_RETRY_S", 0.0)
    cancelling, may_end, again = (asyncio.Event() for _ in range(3))
    begun = set()

    def fail(name):
        raise OSError("the disk is full")

    async def route(scope, receive, send):
        name = await name_in(receive)
        if name in begun:
            again.set()
            await asyncio.Event().wait()
        begun.add(name)
        if name == "a-2":
            await reply(send)
            return
        try:
            await asyncio.Event().wait()
        finally:
            cancelling.set()
            await may_end.wait()

    async with running(tmp_path, route, prepare=calling(fail)) as runner:
        await submit(runner, "a-1", "a-2")
        await asyncio.wait_for(cancelling.wait(), WAIT_S)
        stopping = asyncio.create_task(runner.stop())
        await asyncio.sleep(0)
        may_end.set()
        started_again = asyncio.create_task(again.wait())
        await asyncio.wait([stopping, started_again], return_when=asyncio.FIRST_COMPLETED)
        assert not again.is_set()
        started_again.cancel()


async def test_a_line_cancelled_before_its_first_step_gives_its_slot_back(tmp_path):
    """The database fails for a line while the next line of its batch gets a slot."""
    writing, may_fail, has_failed = (threading.Event() for _ in range(3))

    def fail(name):
        if name == "a-1" and not writing.is_set():
            writing.set()
            may_fail.wait(WAIT_S)
            raise OSError("of this test")

    route, stats = Held(), BatchStats()
    async with running(tmp_path, route, stats, calling(fail), max_running=3) as runner:
        other = await submit(runner, "b-1", "b-2")
        for name in ("b-1", "b-2"):
            await route.until_begun(name)
        batch = await submit(runner, "a-1", "a-2", "a-3")
        await route.until_begun("a-1")
        route.released["a-1"].set()
        assert await asyncio.to_thread(writing.wait, WAIT_S)
        # The thread does this after the failure.
        after = asyncio.create_task(runner.thread.call(has_failed.set))
        await asyncio.sleep(0)
        # The loop learns of the failure and of the end of the other batch's line at once.
        may_fail.set()
        assert has_failed.wait(WAIT_S)
        route.released["b-1"].set()
        await after
        route.released["b-2"].set()
        assert (await ended(runner, other)).status == "completed"
        assert (await cancelled(runner, batch)).status == "cancelled"
        assert stats.num_running == 0
