"""The database of files and batches is right when a process ends at any point."""

import codecs
import contextlib
import json
import sqlite3
from dataclasses import replace
from types import MappingProxyType

import pytest
from openai.types import FileObject

from baton.gateway.batches import file_store
from baton.gateway.batches.batch_store import BatchStore, NewBatch
from baton.gateway.batches.database import Database
from baton.gateway.batches.file_store import FileStore, StoreFull
from baton.gateway.batches.input_file import InputParser, WrongFile
from baton.gateway.batches.route_call import Answer
from baton.gateway.batches.status import TRANSITIONS, Status, advance
from baton.gateway.responses_route import Responses
from baton.runtime.config import BatchesConfig
from baton.runtime.config_error import ConfigError

ROUTE, OWNER, NOW_S = "/v1/completions", b"me", 1_800_000_000
SECRET = "Bearer secret-of-this-test"
DONE = Answer(200, "req_1", b'{"usage": {"prompt_tokens": 2, "completion_tokens": 3}}', None)


@contextlib.contextmanager
def opened(path, **limits):
    config = BatchesConfig(**limits)
    with Database(str(path)) as database:
        yield FileStore(database, config), BatchStore(database, config)


def begin_upload(files, num_bytes, owner=OWNER):
    file_id = file_store.new_id("files")
    files.begin_upload(file_id, owner, num_bytes)
    return file_id


def file_object(file_id, num_bytes, created_at=NOW_S):
    return FileObject(
        id=file_id,
        object="file",
        bytes=num_bytes,
        created_at=created_at,
        expires_at=NOW_S + 1000,
        filename="a",
        purpose="batch",
        status="processed",
    )


def upload(files, *chunks, owner=OWNER, created_at=NOW_S):
    num_bytes = sum(map(len, chunks))
    file = file_object(begin_upload(files, num_bytes, owner), num_bytes, created_at)
    for number, data in enumerate(chunks):
        files.add_chunk(file.id, number, data)
    files.finish_upload(owner, file)
    return file.id


def new_batch(batches, file_id, num_input_bytes=0, owner=OWNER):
    new = NewBatch(owner, SECRET, "", ROUTE, file_id, num_input_bytes, None, 1000)
    return batches.create(new, NOW_S)


def num_added(add):
    """Adds until a limit is reached; returns how often that succeeded."""
    num = 0
    with contextlib.suppress(StoreFull):
        while True:
            add()
            num += 1
    return num


def lines(*names):
    found = ({"custom_id": one, "method": "POST", "url": ROUTE, "body": {}} for one in names)
    return b"\n".join(json.dumps(one).encode() for one in found)


def validate(batches, batch):
    batches.begin_validation(batch.id)
    parser, number = InputParser(ROUTE, 1000, 100), 0
    while batches.read_input(batch, parser, number):
        number += 1
    batches.begin_lines(batch.id, NOW_S)


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it(size):
    line = json.dumps({"custom_id": "a", "method": "POST", "url": ROUTE, "body": {}}).encode()
    data = codecs.BOM_UTF8 + line + b"\n" + codecs.BOM_UTF8 + line
    parser, found = InputParser(ROUTE, 1000, 10), []
    for start in range(0, len(data), size):
        last = start + size >= len(data)
        found += parser.feed(data[start : start + size], last=last)
    first, second = found
    assert (first.custom_id, first.code) == ("a", "")
    assert second.code == "invalid_json_line"
    assert not list(InputParser(ROUTE, 1000, 10).feed(codecs.BOM_UTF8, last=True))


def parsed(url=ROUTE, defaults=MappingProxyType({}), **body):
    found = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    (line,) = InputParser(url, 10_000, 1, defaults).feed(json.dumps(found).encode(), last=True)
    return line


@pytest.mark.parametrize(
    ("body", "store"), [({}, False), ({"store": None}, False), ({"store": True}, True)]
)
def test_responses_of_a_batch_are_stored_only_where_it_says_so(body, store):
    line = parsed("/v1/responses", Responses.batch_defaults, **body)
    assert json.loads(line.body)["store"] is store


def test_a_long_name_of_a_model_is_kept_in_the_request_only():
    line = parsed(model="m" * 1000)
    assert line.model == "m" * 256
    assert json.loads(line.body)["model"] == "m" * 1000


def test_empty_lines_are_limited_too():
    request = lines("a")
    for line_end in (b"\n", b"\n \n"):
        found = InputParser(ROUTE, 1000, 3).feed((request + line_end) * 3, last=True)
        assert len(list(found)) == 3
    with pytest.raises(WrongFile, match="empty lines") as problem:
        list(InputParser(ROUTE, 1000, 3).feed(b"\n" * 100, last=True))
    assert problem.value.code == "too_many_tasks"


def test_lines_may_cross_chunks(tmp_path):
    data = lines("a", "b", "c")
    with opened(tmp_path) as (files, batches):
        for size in (1, 7, 50, len(data)):
            chunks = [data[start : start + size] for start in range(0, len(data), size)]
            batch = new_batch(batches, upload(files, *chunks))
            validate(batches, batch)
            found = batches.next_lines(batch.id, 0, 0)
            assert [(line.number, line.custom_id) for line in found] == [
                (1, "a"),
                (2, "b"),
                (3, "c"),
            ]


@pytest.mark.parametrize("prompt", ["冷" * 100, [1] * 100], ids=["Chinese", "token IDs"])
def test_a_line_within_the_limit_has_a_body_within_it(prompt):
    """Its route checks the body against the same limit."""
    body = {"prompt": prompt}
    found = {"custom_id": "a", "method": "POST", "url": ROUTE, "body": body}
    data = json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode()
    (line,) = InputParser(ROUTE, len(data), 1).feed(data, last=True)
    assert json.loads(line.body) == body
    assert len(line.body) < len(data)


def test_lines_are_read_by_parts_of_bounded_size(tmp_path):
    names = [f"{n}" for n in range(70)]
    body = {"prompt": "x" * 1_100_000}
    large = ({"custom_id": n, "method": "POST", "url": ROUTE, "body": body} for n in "ab")
    data = lines(*names) + b"".join(b"\n" + json.dumps(one).encode() for one in large)
    with opened(tmp_path) as (files, batches):
        batch = new_batch(batches, upload(files, data))
        batches.begin_validation(batch.id)
        parser = InputParser(ROUTE, 2_000_000, 100)
        assert batches.read_input(batch, parser, 0)
        assert not batches.read_input(batch, parser, 1)
        batches.begin_lines(batch.id, NOW_S)
        after, sizes, found = 0, [], []
        while part := batches.next_lines(batch.id, 0, after):
            after = part[-1].number
            sizes.append(len(part))
            found += [line.custom_id for line in part]
        assert found == [*names, "a", "b"]
        assert sizes == [64, 7, 1]


def test_a_result_is_written_once(tmp_path):
    with opened(tmp_path) as (files, batches):
        batch = new_batch(batches, upload(files, lines("a", "b")))
        validate(batches, batch)
        a, b = batches.next_lines(batch.id, 0, 0)
        for _ in range(2):
            batches.record(batch.id, a, DONE)
    with opened(tmp_path) as (files, batches):
        (batch,) = batches.open_batches()
        assert (batch.status, batch.authorization) == (Status.IN_PROGRESS, SECRET)
        assert batches.next_lines(batch.id, 0, 0) == [b]
        assert batches.next_lines(batch.id, 0, 2) == []
        batches.record(batch.id, b, Answer(400, "req_2", b"{}", None))
        for _ in range(2):
            batches.finish(batch.id, Status.COMPLETED, NOW_S)
        found = batches.find(OWNER, batch.id)
        counts, usage = found.request_counts, found.usage
        assert (counts.total, counts.completed, counts.failed) == (2, 1, 1)
        assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (2, 3, 5)
        assert not batches.open_batches()
        for file_id, name in ((found.output_file_id, "a"), (found.error_file_id, "b")):
            part = files.read(OWNER, file_id, 0)
            assert json.loads(part.data)["custom_id"] == name
            assert files.read(OWNER, file_id, part.next).data == b""


@pytest.mark.parametrize(
    ("usage", "inputs", "cached", "outputs"),
    [
        (
            {
                "prompt_tokens": 9,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens": 3,
            },
            *(9, 4, 3),
        ),
        (
            {
                "input_tokens": 9,
                "input_tokens_details": {"cached_tokens": 4},
                "output_tokens": 3,
            },
            *(9, 4, 3),
        ),
        # Anthropic's input tokens are those that no cache has.
        (
            {
                "input_tokens": 2,
                "cache_read_input_tokens": 4,
                "cache_creation_input_tokens": 3,
                "output_tokens": 3,
            },
            *(9, 4, 3),
        ),
        (
            {"input_tokens": 9, "cache_creation_input_tokens": None, "output_tokens": 3},
            *(9, 0, 3),
        ),
    ],
)
def test_the_usage_of_a_batch_counts_each_api_alike(tmp_path, usage, inputs, cached, outputs):
    with opened(tmp_path) as (files, batches):
        batch = new_batch(batches, upload(files, lines("a", "b")))
        validate(batches, batch)
        for line in batches.next_lines(batch.id, 0, 0):
            batches.record(
                batch.id, line, replace(DONE, body=json.dumps({"usage": usage}).encode())
            )
        found = batches.find(OWNER, batch.id).usage
        told = (found.input_tokens, found.input_tokens_details.cached_tokens, found.output_tokens)
        assert told == (2 * inputs, 2 * cached, 2 * outputs)
        assert found.total_tokens == 2 * (inputs + outputs)


def test_results_are_read_by_parts_of_bounded_size(tmp_path):
    names = [f"{n}" for n in range(300)]
    with opened(tmp_path) as (files, batches):
        batch = new_batch(batches, upload(files, lines(*names)))
        batches.begin_validation(batch.id)
        parser, number = InputParser(ROUTE, 1000, 1000), 0
        while batches.read_input(batch, parser, number):
            number += 1
        batches.begin_lines(batch.id, NOW_S)
        after = 0
        while part := batches.next_lines(batch.id, 0, after):
            after = part[-1].number
            for line in part:
                large = json.dumps("x" * (200_000 if line.number <= 40 else 1))
                batches.record(batch.id, line, replace(DONE, body=f'{{"a": {large}}}'.encode()))
        batches.finish(batch.id, Status.COMPLETED, NOW_S)
        file_id = batches.find(OWNER, batch.id).output_file_id
        parts, position = [], 0
        while data := (part := files.read(OWNER, file_id, position)).data:
            parts.append(data)
            position = part.next
        # A part may exceed the limit by one line.
        assert max(map(len, parts)) < file_store.RESULT_BYTES_AT_ONCE + 201_000
        found = b"".join(parts)
        assert len(found) == files.find(OWNER, file_id, NOW_S).bytes
        assert [json.loads(one)["custom_id"] for one in found.splitlines()] == names


def test_an_interrupted_validation_begins_again(tmp_path):
    with opened(tmp_path) as (files, batches):
        batch = new_batch(batches, upload(files, lines("a", "b") + b"\n", lines("c", "d")))
        batches.begin_validation(batch.id)
        assert batches.read_input(batch, InputParser(ROUTE, 1000, 100), 0)
    with opened(tmp_path) as (files, batches):
        (batch,) = batches.open_batches()
        assert batch.status is Status.VALIDATING
        validate(batches, batch)
        found = batches.next_lines(batch.id, 0, 0)
        assert [line.custom_id for line in found] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("num_read", [0, 1, 2])
def test_an_input_file_deleted_during_validation_fails_its_batch(tmp_path, num_read):
    with opened(tmp_path) as (files, batches):
        file_id = upload(files, lines("a", "b") + b"\n", lines("c", "d"))
        batch = new_batch(batches, file_id)
        batches.begin_validation(batch.id)
        parser = InputParser(ROUTE, 1000, 100)
        for number in range(num_read):
            assert batches.read_input(batch, parser, number)
        assert files.delete(OWNER, file_id)
        with pytest.raises(WrongFile, match="was deleted") as problem:
            batches.read_input(batch, parser, num_read)
        batches.fail(batch.id, problem.value, NOW_S)
        found = batches.find(OWNER, batch.id)
        assert found.status == "failed"
        assert [one.code for one in found.errors.data] == ["input_file_deleted"]


def test_a_batch_cancelled_before_its_lines_are_counted_has_no_results(tmp_path):
    with opened(tmp_path) as (files, batches):
        batch = new_batch(batches, upload(files, lines("a") + b"\nbroken\n", lines("b")))
        batches.begin_validation(batch.id)
        assert batches.read_input(batch, InputParser(ROUTE, 1000, 100), 0)
        assert batches.begin_cancel(batch.id, NOW_S)
        batches.finish(batch.id, Status.COMPLETED, NOW_S)
        found = batches.find(OWNER, batch.id)
        assert (found.status, found.output_file_id, found.error_file_id) == (
            "cancelled",
            None,
            None,
        )
        assert not batches.begin_cancel(batch.id, NOW_S)


def test_an_unfinished_upload_is_dropped_by_the_next_process(tmp_path):
    with opened(tmp_path) as (files, _):
        files.add_chunk(begin_upload(files, 200_000), 0, b"x" * 200_000)
        kept = upload(files, b"abc")
    with opened(tmp_path, max_bytes=250_000) as (files, _):
        files.delete_orphans()
        running = begin_upload(files, 10)
        files.add_chunk(running, 0, b"x" * 10)
        files.drop_upload("file-of-another")
        files.finish_upload(OWNER, file_object(running, 10))
        assert files.read(OWNER, running, 0).data == b"x" * 10
        assert files.read(OWNER, kept, 0).data == b"abc"
        files.check_room(b"another", 100_000)


def test_lines_that_are_not_read_yet_have_their_room(tmp_path):
    with opened(tmp_path, max_bytes=1_000_000) as (files, batches):
        file_id = upload(files, lines("a"), b"x" * 200_000)
        files.check_room(b"another", 500_000)
        reading = new_batch(batches, file_id, 200_000)
        with pytest.raises(StoreFull, match="max_bytes"):
            files.check_room(b"another", 500_000)
        validate(batches, reading)
        files.check_room(b"another", 400_000)


def test_a_running_upload_has_its_room(tmp_path):
    with opened(tmp_path, max_bytes=1_000_000) as (files, _):
        file_id = begin_upload(files, 500_000)
        with pytest.raises(StoreFull, match="max_bytes"):
            begin_upload(files, 500_000, b"another")
        files.add_chunk(file_id, 0, b"x" * 200_000)
        files.drop_upload(file_id)
        begin_upload(files, 500_000, b"another")


def test_a_caller_leaves_room_for_the_files_of_others(tmp_path):
    with opened(tmp_path, max_bytes=2_000_000) as (files, _):
        assert num_added(lambda: upload(files, b"x" * 200_000)) == 7
        upload(files, b"x" * 200_000, owner=b"another")
    with opened(tmp_path / "count", max_files=20) as (files, _):
        assert num_added(lambda: upload(files, b"x")) == 15
        upload(files, b"x", owner=b"another")


def test_a_caller_leaves_room_for_the_results_of_others(tmp_path):
    with opened(tmp_path, max_bytes=2_000_000) as (files, batches):
        names = [str(n) for n in range(60)]
        batch = new_batch(batches, upload(files, lines(*names)))
        validate(batches, batch)
        large = replace(DONE, body=json.dumps({"a": "x" * 30_000}).encode())
        for line in batches.next_lines(batch.id, 0, 0):
            if files.is_full_for(OWNER):
                break
            batches.record(batch.id, line, large)
        assert files.is_full_for(OWNER)
        assert not files.is_full_for(b"another")
        upload(files, b"x" * 200_000, owner=b"another")


def test_a_caller_leaves_room_for_the_batches_of_others(tmp_path):
    with opened(tmp_path, max_files=8) as (files, batches):
        file_id, created = upload(files, lines("a")), []
        assert num_added(lambda: created.append(new_batch(batches, file_id))) == 6
        other = new_batch(batches, file_id, owner=b"another")
        # Ended batches with results stay, those without results make place.
        with_results, *without = created[:3]
        validate(batches, with_results)
        for batch in (with_results, *without):
            batches.finish(batch.id, Status.EXPIRED, NOW_S)
        new_batch(batches, file_id)
        assert all(batches.find(OWNER, batch.id) is None for batch in without)
        assert batches.find(OWNER, with_results.id) is not None
        assert batches.find(b"another", other.id) is not None


def test_a_caller_does_not_push_out_the_batches_of_smaller_callers(tmp_path):
    with opened(tmp_path, max_files=12) as (files, batches):
        file_id, created = upload(files, lines("a")), []
        for _ in range(6):
            created.append(new_batch(batches, file_id))
            validate(batches, created[-1])
        small = [new_batch(batches, file_id, owner=b"small") for _ in range(4)]
        for batch in (*small, *created):
            batches.finish(batch.id, Status.EXPIRED, NOW_S)
        with pytest.raises(StoreFull, match="10 batches are kept, 6 of them of this caller"):
            new_batch(batches, file_id)
        # One batch without result files is not enough, and stays.
        assert files.delete(OWNER, batches.find(OWNER, created[0].id).error_file_id)
        other = new_batch(batches, file_id, owner=b"other")
        with pytest.raises(StoreFull, match="11 batches are kept, 6 of them of this caller"):
            new_batch(batches, file_id)
        kept = (*created, *small)
        owners = [OWNER] * 6 + [b"small"] * 4
        assert all(map(batches.find, owners, (batch.id for batch in kept)))
        # A smaller caller pushes out the oldest batch of callers with more batches.
        new_batch(batches, file_id, owner=b"other")
        assert batches.find(OWNER, created[0].id) is None
        assert all(map(batches.find, owners[1:], (batch.id for batch in kept[1:])))
        assert batches.find(b"other", other.id) is not None


def test_all_batches_that_must_go_are_deleted_together(tmp_path):
    with opened(tmp_path, max_files=40) as (files, batches):
        file_id = upload(files, lines("a"))
        created = [new_batch(batches, file_id) for _ in range(24)]
        for batch in created:
            batches.finish(batch.id, Status.EXPIRED, NOW_S)
        others = [new_batch(batches, file_id, owner=b"%d" % n) for n in range(12)]
        new_batch(batches, file_id)
        # With 24 - 4 + 1 batches of 33, this caller has three times the 7 that stay free.
        assert [one.id for one in created if batches.find(OWNER, one.id) is None] == [
            one.id for one in created[:4]
        ]
        assert all(batches.find(b"%d" % n, one.id) for n, one in enumerate(others))


def test_chunks_that_a_full_disk_keeps_are_deleted_later(tmp_path):
    with opened(tmp_path) as (files, _):
        file_id = begin_upload(files, 3)
        files.add_chunk(file_id, 0, b"abc")
        with files._database.transaction() as db:
            db.execute(
                "CREATE TEMP TRIGGER failing BEFORE DELETE ON chunks "
                "BEGIN SELECT no_such_function(); END"
            )
        with pytest.raises(sqlite3.OperationalError):
            files.drop_upload(file_id)
        with files._database.transaction() as db:
            db.execute("DROP TRIGGER failing")
        files.delete_orphans()
        with files._database.transaction() as db:
            assert db.execute("SELECT count(*) FROM chunks").fetchone()[0] == 0


def test_some_of_the_disk_stays_free(tmp_path, monkeypatch):
    with opened(tmp_path) as (files, _):
        upload(files, b"abc")
        assert not files.is_full_for(OWNER)
        monkeypatch.setattr(file_store, "RESERVE_BYTES", 2**62)
        assert files.is_full_for(OWNER)
        with pytest.raises(StoreFull, match=r"the disk of http\.batches\.dir has \d+ bytes free"):
            upload(files, b"abc")


def test_a_transaction_that_fails_leaves_nothing_behind(tmp_path):
    with Database(str(tmp_path)) as database:
        with database.transaction() as db:
            (pages,) = db.execute("PRAGMA page_count").fetchone()
            db.execute(f"PRAGMA max_page_count = {pages + 2}")
        insert = "INSERT INTO chunks VALUES ('file', ?, ?)"
        rows = [(0, b"x"), (1, b"x" * 100_000)]
        with pytest.raises(sqlite3.OperationalError, match="full"), database.transaction() as db:
            db.executemany(insert, rows)
        with database.transaction() as db:
            assert db.execute("SELECT count(*) FROM chunks").fetchone()[0] == 0
            db.execute(insert, (0, b"x"))


def test_credentials_and_prompts_do_not_outlive_what_needs_them(tmp_path):
    with opened(tmp_path) as (files, batches):
        file_id = upload(files, lines("name-of-this-test"))
        batch = new_batch(batches, file_id)
        validate(batches, batch)
        (line,) = batches.next_lines(batch.id, 0, 0)
        batches.record(batch.id, line, DONE)
        batches.finish(batch.id, Status.COMPLETED, NOW_S)
        found = batches.find(OWNER, batch.id)
        for gone in (file_id, found.output_file_id):
            assert files.delete(OWNER, gone)
            assert files.read(OWNER, gone, 0) is None
    # Closing has emptied the write-ahead log.
    data = (tmp_path / "batches.sqlite").read_bytes()
    assert batch.id.encode() in data
    assert SECRET.encode() not in data
    assert b"name-of-this-test" not in data


def test_old_batches_are_deleted_with_their_results(tmp_path):
    with opened(tmp_path, expires_s=500) as (files, batches):
        batch = new_batch(batches, upload(files, lines("a")))
        validate(batches, batch)
        batches.finish(batch.id, Status.EXPIRED, NOW_S)
        batches.delete_old(NOW_S + 999)
        # Its results are kept for longer.
        assert batches.find(OWNER, batch.id) is not None
        files.delete_expired(NOW_S + 1000)
        batches.delete_old(NOW_S + 1000)
        assert batches.find(OWNER, batch.id) is None
    with sqlite3.connect(tmp_path / "batches.sqlite") as db:
        for table in ("files", "chunks", "batches", "lines"):
            assert db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    db.close()


def test_only_moves_in_the_table_are_possible():
    for old in Status:
        for new in Status:
            if new in TRANSITIONS[old]:
                assert advance(old, new) is new
            else:
                with pytest.raises(ValueError, match="cannot become"):
                    advance(old, new)


def become_version_1(db):
    db.execute("ALTER TABLE lines DROP COLUMN model_number")
    db.execute("ALTER TABLE batches DROP COLUMN line_bytes")
    db.execute("PRAGMA user_version = 1")


def test_a_database_of_an_earlier_version_goes_on(tmp_path):
    with opened(tmp_path) as (files, batches):
        batch = new_batch(batches, upload(files, lines("a", "b")))
        validate(batches, batch)
    with sqlite3.connect(tmp_path / "batches.sqlite") as db:
        become_version_1(db)
    db.close()
    with opened(tmp_path) as (files, batches):
        assert batches.model_numbers(batch.id) == [0]
        assert [line.custom_id for line in batches.next_lines(batch.id, 0, 0)] == ["a", "b"]


def listed(page):
    """Returns the IDs of all pages of at most 2 rows; `page` gets `after`."""
    found, more = [], True
    while more:
        rows, more = page(found[-1] if found else None)
        found += [row.id for row in rows]
    return found


@pytest.mark.parametrize("first_digits", ["fedc", "0123"])
def test_rows_of_an_earlier_version_are_listed_in_the_order_of_creation(tmp_path, first_digits):
    """The IDs of version 1 have no time in them."""
    with opened(tmp_path) as (files, batches):
        for _ in range(4):
            new_batch(batches, upload(files, lines("a")))
    old = [digit * 24 for digit in first_digits]
    with sqlite3.connect(tmp_path / "batches.sqlite") as db:
        for seq, digits in enumerate(old, 1):
            # They have been created in the same second.
            for table, prefix in (("files", "file-"), ("batches", "batch_")):
                db.execute(
                    f"UPDATE {table} SET id = ?, created_at = 1000 WHERE seq = ?",
                    (f"{prefix}{digits}", seq),
                )
        become_version_1(db)
    db.close()
    with opened(tmp_path) as (files, batches):
        new_files = [upload(files, lines("a")) for _ in range(3)]
        new_batches = [new_batch(batches, new_files[0]).id for _ in range(3)]
        all_files = [*(f"file-{digits}" for digits in old), *new_files]
        all_batches = [*(f"batch_{digits}" for digits in old), *new_batches]
        assert listed(lambda after: batches.page(OWNER, after, 2)) == all_batches[::-1]
        for ascending, expected in ((True, all_files), (False, all_files[::-1])):

            def page(after, ascending=ascending):
                return files.page(OWNER, after, 2, NOW_S, ascending=ascending)

            assert listed(page) == expected


@pytest.mark.parametrize("ascending", [True, False])
def test_a_page_after_a_deleted_file_goes_on_where_the_file_was(tmp_path, monkeypatch, ascending):
    # The first three files have the same second.
    times = iter(NOW_S * 10**9 + ns for ns in (1, 2, 3, 10**9, 2 * 10**9))
    with opened(tmp_path) as (files, _):
        names = []
        for time_ns in times:
            monkeypatch.setattr(file_store.time, "time_ns", lambda now=time_ns: now)
            names.append(upload(files, b"a", created_at=time_ns // 10**9))
        monkeypatch.undo()
        # Every second file stays.
        for name in names[1::2]:
            assert files.delete(OWNER, name)
        for number in (1, 3):
            found, _ = files.page(OWNER, names[number], 10, NOW_S, ascending=ascending)
            rest = names[number + 1 :: 2] if ascending else names[number - 1 :: -2]
            assert [file.id for file in found] == rest


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    with opened(tmp_path):
        pass
    with sqlite3.connect(tmp_path / "batches.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match=r"http\.batches\.dir: .* has version 99"):
        Database(str(tmp_path))
    (tmp_path / "batches.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(ConfigError, match=r"http\.batches\.dir: cannot use .*not a database"):
        Database(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"http\.batches\.dir: cannot use"):
        Database(str(tmp_path / "file"))
