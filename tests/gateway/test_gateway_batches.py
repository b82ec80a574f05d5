"""OpenAI's Files and Batches APIs, with the official client."""

import asyncio
import contextlib
import errno
import functools
import io
import json
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import AsyncExitStack

import httpx2 as httpx
import openai as sdk
import pytest
import yaml
from openai import AsyncOpenAI
from starlette.datastructures import UploadFile

from baton import models
from baton.gateway import cell
from baton.gateway.batches import route_call, runner
from baton.gateway.batches.file_store import FileStore
from baton.runtime import errors
from baton.v1 import common_pb2
from tests.client.scripted_inference import (
    ScriptedInference,
    accepted,
    delta,
    failed,
    finished,
    serving,
)
from tests.cluster.processes import Cluster
from tests.gateway.baton_command import START_S, Process
from tests.gateway.scripted_cell import CellOf, serve

COMPLETIONS = "/v1/completions"
WAIT_S = 300.0
DAY_S, MONTH_S = 86_400, 30 * 86_400
# Times of a gateway whose clock the test sets.
NOW_S = 1_800_000_000
BODY = {"model": "demo", "prompt": [5, 6, 7, 8], "max_tokens": 3}


def line(custom_id, **fields):
    found = {"custom_id": custom_id, "method": "POST", "url": COMPLETIONS, "body": BODY}
    return json.dumps(found | fields).encode()


def with_body(custom_id, **fields):
    return line(custom_id, body=BODY | fields)


async def upload(openai, *lines, **options):
    data = io.BytesIO(b"\n".join(lines))
    return await openai.files.create(file=("in.jsonl", data), purpose="batch", **options)


async def submit(openai, *lines, endpoint=COMPLETIONS, **options):
    file = await upload(openai, *lines)
    return await openai.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **options
    )


async def until(openai, batch, holds):
    """Polls a batch until the condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not holds(batch):
            await asyncio.sleep(0.02)
            batch = await openai.batches.retrieve(batch.id)
    return batch


def is_ended(batch):
    return batch.status in ("failed", "completed", "expired", "cancelled")


async def ended(openai, batch):
    return await until(openai, batch, is_ended)


async def content(openai, file_id):
    if file_id is None:
        return []
    text = (await openai.files.content(file_id)).text
    assert text.endswith("\n")
    return [json.loads(one) for one in text.splitlines()]


async def results(openai, batch):
    """The lines of the result file and of the error file."""
    return [await content(openai, one) for one in (batch.output_file_id, batch.error_file_id)]


@pytest.fixture
def directory(tmp_path):
    return {"dir": str(tmp_path / "batches")}


@pytest.fixture
async def batching(start_gateway, cluster, directory):
    async with start_gateway(cluster.address, batches=directory) as gateway:
        yield gateway


@pytest.fixture
async def openai(batching):
    async with batching.openai() as client:
        yield client


@contextlib.asynccontextmanager
async def own_cluster(directory, model, *workers):
    with Cluster(directory, model, elastic=False) as cluster:
        for name in workers:
            cluster.start_worker({"p": "prefill", "d": "decode"}[name[0]], name)
        if workers:
            await cluster.serving(len(workers))
        yield cluster


@contextlib.contextmanager
def gateway_process(address, directory, batches):
    """`baton gateway` as a process; yields it, with its URL as `url`."""
    config = directory / "gateway.yaml"
    config.write_text(yaml.safe_dump({"http": {"listen": "127.0.0.1:0", "batches": batches}}))
    process = Process(
        *("gateway", "--coordinator", address, "--config", str(config)), directory=directory
    )
    try:
        process.url = process.ready(r"^ready http=(\S+)$").group(1)
        yield process
    finally:
        process.close()


def client(url):
    http = sdk.DefaultAsyncHttpxClient(verify=False)
    return AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=WAIT_S, max_retries=5, http_client=http
    )


# ---- The whole flow


async def test_a_batch_from_its_upload_to_its_results(openai, cluster):
    lines = [with_body(f"request-{n}", prompt=[5, 6, 7 + n]) for n in range(20)]
    file = await upload(openai, *lines)
    assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
    assert (file.filename, file.bytes) == ("in.jsonl", len(b"\n".join(lines)))
    assert file.expires_at == file.created_at + MONTH_S
    assert (await openai.files.content(file.id)).content == b"\n".join(lines)
    batch = await openai.batches.create(
        input_file_id=file.id,
        endpoint=COMPLETIONS,
        completion_window="24h",
        metadata={"project": "a"},
    )
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", COMPLETIONS)
    assert batch.expires_at == batch.created_at + DAY_S
    batch = await ended(openai, batch)
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"project": "a"}, "demo")
    assert batch.error_file_id is None
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (60, 60)
    done, _ = await results(openai, batch)
    assert [one["custom_id"] for one in done] == [f"request-{n}" for n in range(20)]
    for n, one in enumerate(done):
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        body = one["response"]["body"]
        expected = cluster.vocabulary.tokenizer.decode(cluster.expected([5, 6, 7 + n], 3))
        assert (body["object"], body["choices"][0]["text"]) == ("text_completion", expected)
    assert len({one["id"] for one in done}) == len({one["response"]["request_id"] for one in done})
    output = await openai.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.bytes == len((await openai.files.content(output.id)).content)


async def test_chats_and_bodies_of_many_forms(openai):
    turns = [{"role": "user", "content": "Tschüß \U0001f600"}]
    chat = {"model": "demo", "messages": turns, "max_tokens": 2}
    lines = [
        line(name, url="/v1/chat/completions", body=chat | more)
        for name, more in (("a", {}), ("ü", {"n": 2}), ("c", {"priority": -1, "seed": 1}))
    ]
    # Windows line ends, empty lines, and no line end at the end of the file.
    batch = await submit(
        openai, b"\r", *(one + b"\r" for one in lines), b"", endpoint="/v1/chat/completions"
    )
    batch = await ended(openai, batch)
    done, failed = await results(openai, batch)
    assert not failed
    assert [one["custom_id"] for one in done] == ["a", "ü", "c"]
    assert [len(one["response"]["body"]["choices"]) for one in done] == [1, 2, 1]


async def test_lists_are_paged(openai):
    files = [await upload(openai, line("a")) for _ in range(5)]
    names = [file.id for file in files]
    listed = [file.id async for file in await openai.files.list(limit=2)]
    assert listed == names[::-1]
    page = await openai.files.list(limit=2, order="asc", after=names[1], purpose="batch")
    assert ([file.id for file in page.data], page.has_more) == (names[2:4], True)
    assert not (await openai.files.list(purpose="batch_output")).data
    created = []
    for file in files[:3]:
        options = {"endpoint": COMPLETIONS, "completion_window": "24h"}
        created.append(await openai.batches.create(input_file_id=file.id, **options))
    for batch in created:
        await ended(openai, batch)
    listed = [batch.id async for batch in await openai.batches.list(limit=2)]
    assert listed == [batch.id for batch in created[::-1]]
    assert len((await openai.files.list(purpose="batch_output")).data) == 3


async def test_files_can_be_deleted_while_they_are_listed(openai):
    names = [(await upload(openai, line("a"))).id for _ in range(5)]
    deleted = []
    async for file in await openai.files.list(limit=2):
        await openai.files.delete(file.id)
        deleted.append(file.id)
    assert deleted == names[::-1]
    assert not (await openai.files.list()).data


async def test_a_deleted_file_is_gone_and_its_batch_goes_on(openai):
    file = await upload(openai, line("a"))
    batch = await openai.batches.create(
        input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
    )
    batch = await until(openai, batch, lambda one: one.status != "validating")
    deleted = await openai.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    batch = await ended(openai, batch)
    assert batch.status == "completed"
    for gone in (file.id, batch.output_file_id):
        if gone != file.id:
            await openai.files.delete(gone)
        with pytest.raises(sdk.NotFoundError, match="no such file"):
            await openai.files.retrieve(gone)
        with pytest.raises(sdk.NotFoundError, match="no such file"):
            await openai.files.content(gone)


# ---- Wrong input


async def test_wrong_lines_are_in_the_error_file_and_the_others_run(openai):
    lines = [
        line("right-1"),
        b'{"custom_id": "broken", ',
        b'{"custom_id": "\xff"}',
        b"[1, 2]",
        line("right-1"),
        line("get", method="GET"),
        line("elsewhere", url="/v1/chat/completions"),
        line("", body=BODY),
        line(7, body=BODY),
        line("text", body="x"),
        line("extra", priority=1),
        with_body("stream", stream=True),
        with_body("model", model="other"),
        with_body("field", temperature=9),
        with_body("unknown", foo=1),
        line("right-2"),
    ]
    batch = await ended(openai, await submit(openai, *lines))
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed) == ("completed", 16, 2)
    assert counts.failed == 14
    done, failed = await results(openai, batch)
    assert [one["custom_id"] for one in done] == ["right-1", "right-2"]
    # Lines that were not executed name the line; the others have the response of the route.
    errors_by_line = {
        one["error"]["line"]: (one["custom_id"], one["error"]["code"], one["error"]["param"])
        for one in failed
        if one["error"] is not None
    }
    assert errors_by_line == {
        2: (None, "invalid_json_line", None),
        3: (None, "invalid_json_line", None),
        4: (None, "invalid_json_line", None),
        5: ("right-1", "duplicate_custom_id", "custom_id"),
        6: ("get", "invalid_method", "method"),
        7: ("elsewhere", "mismatched_url", "url"),
        8: (None, "invalid_request", "custom_id"),
        9: (None, "invalid_request", "custom_id"),
        10: ("text", "invalid_request", "body"),
        11: ("extra", "unknown_parameter", "priority"),
        12: ("stream", "invalid_request", "body.stream"),
    }
    assert all(
        one["error"]["message"].startswith(f"line {one['error']['line']}: ")
        for one in failed
        if one["error"] is not None
    )
    refused = {
        one["custom_id"]: (
            one["response"]["status_code"],
            one["response"]["body"]["error"]["param"],
        )
        for one in failed
        if one["response"] is not None
    }
    assert refused == {
        "model": (404, "model"),
        "field": (400, "temperature"),
        "unknown": (400, "foo"),
    }


@pytest.mark.parametrize(
    ("lines", "limits", "code"),
    [
        ([b""], {}, "empty_batch"),
        ([b"", b" ", b"\r"], {}, "empty_batch"),
        ([line("a"), line("b"), line("c")], {"max_lines": 2}, "too_many_tasks"),
    ],
)
async def test_a_file_that_is_no_batch_fails_it(
    start_gateway, cluster, directory, lines, limits, code
):
    async with (
        start_gateway(cluster.address, batches=directory | limits) as gateway,
        gateway.openai() as openai,
    ):
        batch = await ended(openai, await submit(openai, *lines))
        assert batch.status == "failed"
        assert [one.code for one in batch.errors.data] == [code]
        assert batch.failed_at is not None
        assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_a_long_line_is_an_error_of_its_own(start_gateway, cluster, directory):
    limits = {"max_body_bytes": 1000}
    async with (
        start_gateway(cluster.address, batches=directory, **limits) as gateway,
        gateway.openai() as openai,
    ):
        # Longer than what is read at a time.
        lines = [line("a"), with_body("b", user="x" * 600_000), line("c")]
        batch = await ended(openai, await submit(openai, *lines))
        done, failed = await results(openai, batch)
        assert [one["custom_id"] for one in done] == ["a", "c"]
        (error,) = (one["error"] for one in failed)
        assert (error["line"], error["code"]) == (2, "invalid_request")
        assert "longer than 1000 bytes" in error["message"]


async def test_wrong_requests_name_what_is_wrong(openai, batching):
    file = await upload(openai, line("a"))
    right = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    many = {str(n): "a" for n in range(17)}
    for wrong, param in (
        ({"input_file_id": "file-unknown"}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": many}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"extra_body": {"foo": 1}}, "foo"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            "output_expires_after.seconds",
        ),
    ):
        with pytest.raises(sdk.BadRequestError) as refused:
            await openai.batches.create(**right | wrong)
        assert refused.value.param == param
    done = await ended(openai, await openai.batches.create(**right))
    with pytest.raises(sdk.BadRequestError, match="must be batch"):
        await openai.batches.create(**right | {"input_file_id": done.output_file_id})
    with pytest.raises(sdk.ConflictError, match="is completed"):
        await openai.batches.cancel(done.id)
    with pytest.raises(sdk.BadRequestError, match="must be 'batch'"):
        await openai.files.create(file=b"x", purpose="fine-tune")
    with pytest.raises(sdk.BadRequestError, match=r"expires_after\.seconds"):
        await upload(openai, line("a"), expires_after={"anchor": "created_at", "seconds": 1})
    for call in (openai.batches.retrieve, openai.batches.cancel):
        with pytest.raises(sdk.NotFoundError, match="no such batch"):
            await call("batch_unknown")
    for list_objects in (openai.files.list, openai.batches.list):
        for wrong, param in (({"limit": 0}, "limit"), ({"after": "x"}, "after")):
            with pytest.raises(sdk.BadRequestError) as refused:
                await list_objects(**wrong)
            assert refused.value.param == param
    form = "multipart/form-data; boundary=x"
    part = b'--x\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\na\r\n'
    key = {"authorization": "Bearer none"}
    async with httpx.AsyncClient(base_url=batching.url, timeout=WAIT_S, headers=key) as http:
        for kind, body, status in (
            ("application/json", b"{}", 415),
            ("multipart/form-data", b"", 400),
            (form, b"", 400),
            (form, b"nonsense", 400),
            (form, part % (b"file", b"") + b"--x--\r\n", 400),
            (form, part % (b"file", b'; filename="a"') + b"--x--\r\n", 400),
            (form, part % (b"other", b"") + b"--x--\r\n", 400),
            (form, part % (b"purpose", b"") * 9 + b"--x--\r\n", 400),
            ("multipart/form-data; boundary=", b"--\r\n", 400),
            ('multipart/form-data; boundary="\xff', b"--\xff\r\n", 400),
            (form, b"--x\r\ncontent-disposition: \xff\r\n\r\na\r\n--x--\r\n", 400),
            (form, b"--x\r\n" + b"a: b\r\n" * 5000 + b"\r\na\r\n--x--\r\n", 400),
        ):
            answer = await http.post(
                "/v1/files",
                content=body,
                headers={"content-type": kind.encode("latin-1"), "connection": "close"},
            )
            assert answer.status_code == status, (kind, body, answer.text)
            assert answer.json()["error"]["type"] == "invalid_request_error"
        for path in ("/v1/files?limit=" + "9" * 9000, "/v1/files?order=up", "/v1/batches?x=1"):
            assert (await http.get(path)).status_code == 400
        assert (await http.head(f"/v1/files/{file.id}")).status_code == 200
        assert (await http.head(f"/v1/files/{file.id}/content")).status_code == 200
        answer = await http.put("/v1/files")
        assert answer.status_code == 405
        answer = await http.post(
            "/v1/files", content=b"", headers={"content-type": form, "origin": "http://a"}
        )
        assert answer.status_code == 403


async def test_large_files_and_a_full_store_are_refused(start_gateway, cluster, directory):
    limits = {"max_file_bytes": 100_000, "max_files": 4, "max_bytes": 400_000}
    async with (
        start_gateway(cluster.address, batches=directory | limits) as gateway,
        gateway.openai() as openai,
    ):
        for size in (100_001, 1_000_000):
            with pytest.raises(sdk.APIStatusError, match="max_file_bytes") as refused:
                await upload(openai, b"x" * size)
            assert refused.value.status_code == 413
        files = [await upload(openai, b"x" * 10_000) for _ in range(3)]
        with pytest.raises(sdk.APIStatusError, match="max_files") as refused:
            await upload(openai, b"x")
        assert refused.value.status_code == 507
        for file in files:
            await openai.files.delete(file.id)
        await upload(openai, b"x" * 100_000)
        await upload(openai, b"x" * 90_000)
        with pytest.raises(sdk.APIStatusError, match="max_bytes"):
            await upload(openai, b"x" * 100_000)


async def test_an_upload_that_fills_the_temporary_directory_is_refused(openai, monkeypatch):
    async def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(UploadFile, "write", fail)
    with pytest.raises(sdk.APIStatusError, match="no room for the upload") as refused:
        await upload(openai, line("a"))
    assert (refused.value.status_code, refused.value.code) == (507, "storage_full")


async def test_batches_that_are_read_together_are_refused_or_complete(
    start_gateway, cluster, directory
):
    limits = {"max_bytes": 2_000_000}
    async with (
        start_gateway(cluster.address, batches=directory | limits) as gateway,
        gateway.openai() as openai,
    ):
        file = await upload(openai, *(with_body(str(n), user="x" * 60_000) for n in range(10)))
        creating = (
            openai.batches.create(
                input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
            )
            for _ in range(8)
        )
        found = await asyncio.gather(*creating, return_exceptions=True)
        refused = [one for one in found if isinstance(one, sdk.APIStatusError)]
        batches = [await ended(openai, one) for one in found if one not in refused]
        assert {one.status_code for one in refused} <= {507}
        assert {one.status for one in batches} == {"completed"}
        assert {one.request_counts.completed for one in batches} == {10}


async def test_a_caller_does_not_keep_another_one_out(start_gateway, cluster, directory):
    async with (
        start_gateway(cluster.address, batches=directory | {"max_files": 8}) as gateway,
        gateway.openai(api_key="one") as one,
        gateway.openai(api_key="another") as other,
    ):
        file = await upload(one, line("a"))
        create = functools.partial(
            one.batches.create,
            input_file_id=file.id,
            endpoint=COMPLETIONS,
            completion_window="24h",
        )
        for add in (functools.partial(upload, one, line("a")), create):
            added = await asyncio.gather(*(add() for _ in range(8)), return_exceptions=True)
            refused = [one for one in added if isinstance(one, sdk.APIStatusError)]
            assert {one.status_code for one in refused} == {507}
        batch = await ended(other, await submit(other, line("a")))
        assert batch.status == "completed"


async def test_without_a_directory_the_routes_say_how_to_turn_them_on(scripted):
    async with scripted.openai() as openai:
        for call in (
            upload(openai, line("a")),
            openai.files.list(),
            openai.files.content("file-a"),
            openai.batches.list(),
            openai.batches.cancel("batch_a"),
        ):
            with pytest.raises(sdk.APIStatusError, match=r"set http\.batches\.dir") as refused:
                await call
            assert refused.value.status_code == 501


# ---- Who runs a line, and when


async def test_another_caller_sees_nothing(batching):
    async with batching.openai() as openai, batching.openai(api_key="another") as other:
        file = await upload(openai, line("a"))
        batch = await ended(openai, await submit(openai, line("a")))
        for call in (
            other.files.retrieve(file.id),
            other.files.content(batch.output_file_id),
            other.files.delete(file.id),
            other.batches.retrieve(batch.id),
            other.batches.cancel(batch.id),
        ):
            with pytest.raises(sdk.NotFoundError):
                await call
        with pytest.raises(sdk.BadRequestError, match="no such file"):
            await other.batches.create(
                input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
            )
        assert not (await other.files.list()).data
        assert not (await other.batches.list()).data
        assert (await openai.files.retrieve(file.id)).id == file.id


async def test_the_key_of_x_api_key_is_the_callers_credential(
    start_gateway, coordinator, inference, directory
):
    mine = {"x-api-key": "mine"}
    upload_form = {"data": {"purpose": "batch"}, "files": {"file": with_body("a")}}
    async with (
        start_gateway(coordinator, batches=directory) as gateway,
        gateway.openai(api_key="mine") as openai,
        httpx.AsyncClient(base_url=gateway.url, timeout=WAIT_S) as http,
    ):
        file = (await http.post("/v1/files", headers=mine, **upload_form)).json()["id"]
        body = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h"}
        batch = (await http.post("/v1/batches", headers=mine, json=body)).json()["id"]
        connection = await inference.connection()
        submitted = await connection.submitted()
        assert submitted.request.authorization == "Bearer mine"
        answer(connection, submitted.stream)
        output = (await ended(openai, await openai.batches.retrieve(batch))).output_file_id
        paths = (f"/v1/files/{file}", f"/v1/files/{output}/content", f"/v1/batches/{batch}")
        for stranger in ({"x-api-key": "another"}, {}):
            for path in paths:
                assert (await http.get(path, headers=stranger)).status_code == 404
            assert (await http.delete(paths[0], headers=stranger)).status_code == 404
            assert not (await http.get("/v1/files", headers=stranger)).json()["data"]
        for path in paths:
            assert (await http.get(path, headers=mine)).status_code == 200


async def test_lines_are_the_callers_requests_in_the_batch_lane(
    start_gateway, coordinator, inference, directory
):
    """A refused line waits and runs again; lines of a caller wait, those of another one run."""
    async with (
        start_gateway(coordinator, batches=directory | {"max_running": 2}) as gateway,
        gateway.openai(api_key="key", default_headers={"x-baton-tenant": "team"}) as openai,
    ):
        batch = await submit(openai, *(with_body(name, model="scripted") for name in "abc"))
        connection = await inference.connection()
        first, second = [await connection.submitted() for _ in range(2)]
        for one in (first, second):
            assert one.request.lane == common_pb2.LANE_BATCH
            assert one.request.tenant == "team"
            assert one.request.authorization == "Bearer key"
        full = errors.ResourceExhausted("full", reason="QUEUE_FULL", retry_after_s=0.01)
        connection.send(failed(first.stream, full))
        answer(connection, second.stream)
        # The refused line runs again, as a request with another ID.
        seen = {first.request.request_id, second.request.request_id}
        for _ in range(2):
            submitted = await connection.submitted()
            seen.add(submitted.request.request_id)
            answer(connection, submitted.stream)
        assert len(seen) == 4
        batch = await ended(openai, batch)
        done, wrong = await results(openai, batch)
        assert not wrong
        assert [one["custom_id"] for one in done] == ["a", "b", "c"]


async def test_only_refusals_of_now_run_again(
    start_gateway, coordinator, inference, directory, monkeypatch
):
    monkeypatch.setattr(route_call, "_RETRY_S", 0.01)
    async with (
        start_gateway(coordinator, batches=directory | {"max_running": 1}) as gateway,
        gateway.openai() as openai,
    ):
        batch = await submit(openai, *(with_body(name, model="scripted") for name in "abcd"))
        connection = await inference.connection()
        for error, num_submissions in (
            (errors.Unavailable("no worker"), 2),
            # Each of the two tries is submitted with two IDs.
            (errors.AlreadyExists("the ID is in use"), 4),
            (errors.ResourceExhausted("large", reason="TOO_LARGE", retry_after_s=None), 1),
            (errors.Internal("two workers died"), 1),
            (errors.DeadlineExceeded("too long"), 1),
        ):
            for _ in range(num_submissions):
                submitted = await connection.submitted()
                connection.send(failed(submitted.stream, error))
        answer(connection, (await connection.submitted()).stream)
        done, wrong = await results(openai, await ended(openai, batch))
        assert [one["custom_id"] for one in done] == ["d"]
        statuses = [(one["custom_id"], one["response"]["status_code"]) for one in wrong]
        assert statuses == [("a", 429), ("b", 500), ("c", 504)]


async def test_lines_of_a_model_that_is_away_do_not_hold_up_the_others(start_gateway, directory):
    async with AsyncExitStack() as stack:
        away, there = CellOf("away", "a"), CellOf("there", "b")
        away.refuses = errors.Unavailable("no decode worker is attached")
        addresses = [await stack.enter_async_context(serve(cell)) for cell in (away, there)]
        limits = directory | {"max_running": 2}
        gateway = await stack.enter_async_context(start_gateway(*addresses, batches=limits))
        openai = await stack.enter_async_context(gateway.openai())
        lines = [with_body(str(n), model="aab"[n % 3], prompt="x") for n in range(30)]
        batch = await submit(openai, *lines)
        batch = await until(openai, batch, lambda one: one.request_counts.completed == 10)
        assert len(there.requests) == 10
        away.refuses = None
        batch = await ended(openai, batch)
        assert (batch.status, batch.request_counts.completed) == ("completed", 30)


class Hung(ScriptedInference):
    """A coordinator that tells its model only while `serves` is set."""

    def __init__(self):
        super().__init__()
        self.serves = asyncio.Event()
        self.serves.set()

    async def GetModel(self, request, context):
        await self.serves.wait()
        directory = os.path.join(os.path.dirname(models.__file__), "glossary")
        return common_pb2.ModelDescription(name="scripted", tokenizer=directory)


async def test_lines_wait_for_a_coordinator_that_hangs(start_gateway, directory, monkeypatch):
    monkeypatch.setattr(cell, "_MODEL_TTL_S", 0.0)
    inference = Hung()
    async with (
        serving(inference) as (address, _),
        start_gateway(address, batches=directory | {"max_running": 1}) as gateway,
        gateway.openai() as openai,
    ):
        # The gateway needs the model's tokenizer for them.
        body = {"model": "scripted", "prompt": "a", "return_token_ids": True}
        batch = await submit(openai, *(with_body(name, **body) for name in "ab"))
        connection = await inference.connection()
        first = await connection.submitted()
        inference.serves.clear()
        with monkeypatch.context() as patch:
            patch.setattr(cell, "_QUERY_TIMEOUT_S", 0.05)
            answer(connection, first.stream)
            async with asyncio.timeout(WAIT_S), httpx.AsyncClient(timeout=WAIT_S) as http:
                refused = re.compile(
                    r'^baton_http_batch_lines_total{outcome="refused"} [1-9]', re.M
                )
                while not is_ended(batch):
                    if refused.search((await http.get(f"{gateway.url}/metrics")).text):
                        break
                    # The route cannot check the caller's credential meanwhile.
                    with contextlib.suppress(sdk.InternalServerError):
                        batch = await openai.batches.retrieve(batch.id)
        inference.serves.set()
        if not is_ended(batch):
            answer(connection, (await connection.submitted()).stream)
        counts = (await ended(openai, batch)).request_counts
        assert (counts.completed, counts.failed) == (2, 0)


def answer(connection, stream):
    connection.send(accepted(stream))
    connection.send(delta(stream, 0, [5], "a"))
    connection.send(finished(stream, common_pb2.FINISH_REASON_LENGTH, 1))


async def test_a_cancelled_batch_has_partial_results(start_gateway, cluster, directory):
    async with (
        start_gateway(cluster.address, batches=directory | {"max_running": 8}) as gateway,
        gateway.openai() as openai,
    ):
        short = [line(f"short-{n}") for n in range(5)]
        long = [with_body(f"long-{n}", max_tokens=1500, ignore_eos=True) for n in range(40)]
        batch = await submit(openai, *short, b"broken", *long)
        batch = await until(openai, batch, lambda one: one.request_counts.completed >= 5)
        batch = await openai.batches.cancel(batch.id)
        assert batch.status in ("cancelling", "cancelled")
        batch = await ended(openai, batch)
        assert batch.status == "cancelled"
        assert batch.cancelling_at <= batch.cancelled_at
        done, wrong = await results(openai, batch)
        assert {f"short-{n}" for n in range(5)} <= {one["custom_id"] for one in done}
        assert wrong[0]["error"]["code"] == "invalid_json_line"
        assert {one["error"]["code"] for one in wrong[1:]} == {"batch_cancelled"}
        counts = batch.request_counts
        assert (counts.completed, counts.failed) == (len(done), len(wrong))
        assert len(done) + len(wrong) == counts.total == 46
        with pytest.raises(sdk.ConflictError, match="is cancelled"):
            await openai.batches.cancel(batch.id)
    # The fixture checks that the coordinator has no requests left.


async def test_metrics_count_batches_and_lines(openai, batching):
    await ended(openai, await submit(openai, line("a"), line("b"), b"broken", with_body("c", n=0)))
    async with httpx.AsyncClient(timeout=WAIT_S) as http:
        text = (await http.get(f"{batching.url}/metrics")).text
    assert 'baton_http_batch_lines_total{outcome="completed"} 2.0' in text
    assert 'baton_http_batch_lines_total{outcome="failed"} 2.0' in text
    assert "baton_http_batches_open 0.0" in text
    assert "baton_http_batch_lines_running 0.0" in text
    assert 'baton_http_requests_total{code="200",route="/v1/batches"}' in text


# ---- Expiry, by the test's clock


class Clock:
    def __init__(self):
        self.now_s = NOW_S

    def __call__(self):
        return self.now_s


async def test_files_and_results_expire(start_gateway, cluster, directory):
    clock = Clock()
    async with (
        start_gateway(cluster.address, batches=directory, clock=clock) as gateway,
        gateway.openai() as openai,
    ):
        hour = {"anchor": "created_at", "seconds": 3600}
        file = await upload(openai, line("a"), expires_after=hour)
        assert (file.created_at, file.expires_at) == (NOW_S, NOW_S + 3600)
        batch = await ended(openai, await submit(openai, line("a"), output_expires_after=hour))
        kept = await ended(openai, await submit(openai, line("a")))
        clock.now_s += 3599
        assert (await openai.files.retrieve(file.id)).id == file.id
        clock.now_s += 1
        for gone in (file.id, batch.output_file_id):
            with pytest.raises(sdk.NotFoundError):
                await openai.files.content(gone)
        assert (await openai.batches.retrieve(batch.id)).status == "completed"
        assert len(await content(openai, kept.output_file_id)) == 1
        clock.now_s += MONTH_S
        for gone in (batch, kept):
            with pytest.raises(sdk.NotFoundError):
                await openai.batches.retrieve(gone.id)
        assert not (await openai.files.list()).data
        assert not (await openai.batches.list()).data


async def test_files_can_be_read_while_the_disk_is_full(
    start_gateway, cluster, directory, monkeypatch
):
    def fail(*_):
        raise sqlite3.OperationalError("database or disk is full")

    clock = Clock()
    async with (
        start_gateway(cluster.address, batches=directory, clock=clock) as gateway,
        gateway.openai() as openai,
    ):
        hour = {"anchor": "created_at", "seconds": 3600}
        expired = await upload(openai, line("a"), expires_after=hour)
        kept = await upload(openai, line("a"))
        batch = await ended(openai, await submit(openai, line("a")))
        monkeypatch.setattr(FileStore, "delete_expired", fail)
        clock.now_s += 3600
        assert len(await content(openai, batch.output_file_id)) == 1
        assert (await openai.files.retrieve(kept.id)).id == kept.id
        assert (await openai.batches.retrieve(batch.id)).status == "completed"
        assert [one.id for one in (await openai.batches.list()).data] == [batch.id]
        listed = [one.id for one in (await openai.files.list()).data]
        assert kept.id in listed
        assert expired.id not in listed
        with pytest.raises(sdk.NotFoundError):
            await openai.files.content(expired.id)


async def test_a_batch_expires_with_the_results_that_it_has(
    start_gateway, tmp_path, model, directory
):
    clock = Clock()
    async with (
        # Without workers, no line can run.
        own_cluster(tmp_path, model) as cluster,
        start_gateway(cluster.address, batches=directory, clock=clock) as gateway,
        gateway.openai() as openai,
    ):
        batch = await submit(openai, line("a"), b"broken", line("b"))
        batch = await until(openai, batch, lambda one: one.status == "in_progress")
        clock.now_s += DAY_S
        batch = await ended(openai, batch)
        assert (batch.status, batch.expired_at) == ("expired", NOW_S + DAY_S)
        done, wrong = await results(openai, batch)
        assert not done
        codes = [(one["custom_id"], one["error"]["code"]) for one in wrong]
        assert codes == [
            ("a", "batch_expired"),
            (None, "invalid_json_line"),
            ("b", "batch_expired"),
        ]


# ---- Processes that die


def right_results(done, num_lines):
    names = [one["custom_id"] for one in done]
    assert len(names) == len(set(names)), "a line is twice in the result"
    assert names == [f"request-{n}" for n in range(num_lines)]
    assert all(one["response"]["status_code"] == 200 for one in done)


async def test_a_killed_gateway_goes_on_where_it_was(cluster, tmp_path, directory):
    num_lines, limits = 300, directory | {"max_running": 16}
    with gateway_process(cluster.address, tmp_path, limits) as process:
        async with client(process.url) as openai:
            lines = [with_body(f"request-{n}", max_tokens=20) for n in range(num_lines)]
            batch = await submit(openai, *lines)
            await until(openai, batch, lambda one: one.request_counts.completed >= 50)
            process.popen.kill()
    with gateway_process(cluster.address, tmp_path, limits) as process:
        async with client(process.url) as openai:
            batch = await openai.batches.retrieve(batch.id)
            assert batch.status == "in_progress"
            assert 50 <= batch.request_counts.completed < num_lines
            batch = await ended(openai, batch)
            counts = batch.request_counts
            assert (counts.total, counts.completed, counts.failed) == (num_lines, num_lines, 0)
            done, _ = await results(openai, batch)
            right_results(done, num_lines)


async def test_a_stopped_gateway_goes_on_where_it_was(start_gateway, cluster, directory):
    num_lines, limits = 100, directory | {"max_running": 4}
    lines = [with_body(f"request-{n}", max_tokens=20) for n in range(num_lines)]
    async with (
        start_gateway(cluster.address, batches=limits) as gateway,
        gateway.openai() as openai,
    ):
        batch = await submit(openai, *lines)
        await until(openai, batch, lambda one: one.request_counts.completed >= 10)
    async with (
        start_gateway(cluster.address, batches=limits) as gateway,
        gateway.openai() as openai,
    ):
        batch = await openai.batches.retrieve(batch.id)
        assert 10 <= batch.request_counts.completed < num_lines
        batch = await ended(openai, batch)
        assert batch.error_file_id is None
        right_results(await content(openai, batch.output_file_id), num_lines)


async def test_lines_at_the_end_of_the_drain_timeout_run_in_the_next_process(
    start_gateway, coordinator, inference, directory
):
    limits = directory | {"max_running": 1}
    async with (
        start_gateway(coordinator, batches=limits, drain_timeout_s=0.05) as gateway,
        gateway.openai() as openai,
    ):
        # The gateway waits for this stream until the timeout is over.
        asked = openai.completions.create(model="scripted", prompt=[5], stream=True)
        asking = asyncio.create_task(asked)
        connection = await inference.connection()
        number = (await connection.submitted()).stream
        connection.send(accepted(number), delta(number, 0, [5], "a"))
        async with await asking as stream:
            batches = [await submit(openai, with_body(name, model="scripted")) for name in "ab"]
            await connection.submitted()
            for batch in batches:
                await until(openai, batch, lambda one: one.status == "in_progress")
            gateway.stop.set()
            await asyncio.wait([gateway.serving], timeout=WAIT_S)
            with pytest.raises(sdk.APIError, match="drain timeout"):
                [chunk async for chunk in stream]
    async with start_gateway(coordinator, batches=limits) as gateway, gateway.openai() as openai:
        connection = await inference.connection()
        for batch in batches:
            found = await openai.batches.retrieve(batch.id)
            assert found.request_counts.failed == 0
            answer(connection, (await connection.submitted()).stream)
        for batch in batches:
            counts = (await ended(openai, batch)).request_counts
            assert (counts.completed, counts.failed) == (1, 0)


async def test_lines_wait_while_there_is_no_room_for_results(
    start_gateway, cluster, directory, monkeypatch
):
    monkeypatch.setattr(runner, "_RETRY_S", 0.02)
    limit, num_lines = 420_000, 400
    async with (
        start_gateway(cluster.address, batches=directory | {"max_bytes": limit}) as gateway,
        gateway.openai() as openai,
        gateway.openai(api_key="another") as another,
    ):
        other = await upload(another, b"x" * 200_000)
        lines = [with_body(f"request-{n}", max_tokens=2) for n in range(num_lines)]
        batch = await submit(openai, *lines)

        async def num_bytes():
            async with httpx.AsyncClient(timeout=WAIT_S) as http:
                text = (await http.get(f"{gateway.url}/metrics")).text
            return float(re.search(r"^baton_http_batches_bytes (\S+)$", text, re.MULTILINE)[1])

        async with asyncio.timeout(WAIT_S):
            while await num_bytes() <= limit:
                batch = await openai.batches.retrieve(batch.id)
                assert not is_ended(batch)
        await another.files.delete(other.id)
        batch = await ended(openai, batch)
        right_results(await content(openai, batch.output_file_id), num_lines)


async def test_a_killed_coordinator_only_delays_lines(start_gateway, tmp_path, model, directory):
    num_lines = 200
    async with (
        own_cluster(tmp_path, model, "p1", "d1") as cluster,
        start_gateway(cluster.address, batches=directory | {"max_running": 16}) as gateway,
        gateway.openai() as openai,
    ):
        lines = [with_body(f"request-{n}", max_tokens=20) for n in range(num_lines)]
        batch = await submit(openai, *lines)
        batch = await until(openai, batch, lambda one: one.request_counts.completed >= 30)
        await asyncio.to_thread(cluster.restart_coordinator)
        batch = await ended(openai, batch)
        counts = batch.request_counts
        assert (batch.status, counts.completed, counts.failed) == ("completed", num_lines, 0)
        done, _ = await results(openai, batch)
        right_results(done, num_lines)


async def test_a_second_gateway_on_the_directory_does_not_start(batching, tmp_path, directory):
    config = tmp_path / "second.yaml"
    config.write_text(yaml.safe_dump({"http": {"listen": "127.0.0.1:0", "batches": directory}}))
    done = await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-m", "baton.cli", "gateway", "--config", str(config)),
            *("--coordinator", "127.0.0.1:1"),
        ],
        capture_output=True,
        text=True,
        timeout=START_S,
        env={**os.environ, "HOME": str(tmp_path)},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert f"http.batches.dir: {directory['dir']} is used by another gateway" in done.stderr
    assert f"(pid {os.getpid()})" in done.stderr
    async with batching.openai() as openai:
        batch = await ended(openai, await submit(openai, line("a")))
        assert batch.status == "completed"


async def test_only_the_owner_can_read_the_directory(batching, directory):
    for path, mode in (("", 0o700), ("batches.sqlite", 0o600), ("batches.sqlite-wal", 0o600)):
        assert os.stat(os.path.join(directory["dir"], path)).st_mode & 0o777 == mode
