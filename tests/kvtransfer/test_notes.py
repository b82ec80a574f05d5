"""Notes from a worker's main process to its engine's scheduler."""

import asyncio
import os
import socket
import stat

import pytest

from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.notes import NoteReader, NoteWriter, path_beside


@pytest.fixture
def socket_path(tmp_path):
    return str(tmp_path / "kv.sock")


@pytest.fixture
def reader(socket_path):
    reader = NoteReader(socket_path)
    yield reader
    reader.close()


def told(notes):
    return [(note.num_submitted, note.handoff_id, list(note.token_ids)) for note in notes]


def test_notes_come_in_their_order(reader, socket_path):
    assert reader.take() == []
    writer = NoteWriter(socket_path)
    assert writer.note(1)
    assert writer.note(2, b"h" * 16, [7, 8])
    assert told(reader.take()) == [(1, b"", []), (2, b"h" * 16, [7, 8])]
    assert reader.take() == []
    assert writer.note(3)
    assert told(reader.take()) == [(3, b"", [])]
    writer.close()
    assert not writer.note(4)
    assert reader.take() == []


def test_only_this_user_may_write(reader, socket_path):
    assert stat.S_IMODE(os.stat(path_beside(socket_path)).st_mode) == 0o600


def test_the_latest_connection_is_the_writer(reader, socket_path):
    first = NoteWriter(socket_path)
    assert first.note(1)
    assert told(reader.take()) == [(1, b"", [])]
    second = NoteWriter(socket_path)
    assert second.note(2)
    assert told(reader.take()) == [(2, b"", [])]
    second.close()
    assert reader.take() == []
    third = NoteWriter(socket_path)
    assert third.note(3)
    assert told(reader.take()) == [(3, b"", [])]
    third.close()
    first.close()


def test_garbage_ends_only_its_own_connection(reader, socket_path):
    with socket.socket(socket.AF_UNIX) as garbage:
        garbage.connect(path_beside(socket_path))
        garbage.sendall(b"\xff" * 64)
        assert reader.take() == []
    writer = NoteWriter(socket_path)
    assert writer.note(1)
    assert told(reader.take()) == [(1, b"", [])]
    writer.close()


def test_a_writer_notices_that_its_reader_has_closed(socket_path):
    reader = NoteReader(socket_path)
    writer = NoteWriter(socket_path)
    assert reader.take() == []
    reader.close()
    assert not os.path.exists(path_beside(socket_path))
    while writer.note(1):
        pass
    assert not writer.alive
    with pytest.raises(OSError, match="No such file"):
        NoteWriter(socket_path)


async def test_many_notes_wait_for_a_reader_that_is_busy(reader, socket_path):
    writer = NoteWriter(socket_path)
    num_notes, tokens = 2000, list(range(1000, 1100))
    # The reader does not read meanwhile; the writer does not wait.
    assert all(writer.note(number, b"h" * 16, tokens) for number in range(num_notes))
    got = []
    while len(got) < num_notes:
        got += reader.take()
        await asyncio.sleep(0)
    assert [note.num_submitted for note in got] == list(range(num_notes))
    assert all(list(note.token_ids) == tokens for note in got)
    # Later notes are sent as usual.
    assert writer.note(num_notes, b"h" * 16, [7])
    assert told(reader.take()) == [(num_notes, b"h" * 16, [7])]
    writer.close()


async def test_waiting_notes_are_bounded(reader, socket_path):
    writer = NoteWriter(socket_path)
    tokens = list(range(1000, 1100))
    num_notes = 0
    while writer.note(num_notes, b"h" * 16, tokens):
        num_notes += 1
    # The last note was dropped. The notes before it arrive, and so do later ones.
    got = []
    while len(got) < num_notes:
        got += reader.take()
        await asyncio.sleep(0)
    assert [note.num_submitted for note in got] == list(range(num_notes))
    assert writer.note(num_notes, b"h" * 16, [7])
    assert told(reader.take()) == [(num_notes, b"h" * 16, [7])]
    writer.close()


async def test_a_reader_that_closes_while_notes_wait_ends_the_writer(socket_path):
    reader = NoteReader(socket_path)
    writer = NoteWriter(socket_path)
    assert reader.take() == []
    assert all(writer.note(number, b"h" * 16, [7]) for number in range(1000))
    reader.close()
    async with asyncio.timeout(120):
        while writer.alive:
            await asyncio.sleep(0)
    assert not writer.note(1000, b"h" * 16, [7])
    writer.close()


async def test_counts_are_dropped_while_notes_wait(reader, socket_path):
    writer = NoteWriter(socket_path)
    assert all(writer.note(number) for number in range(5000))
    first = reader.take()
    assert 0 < len(first) < 5000, "no bound was reached"
    assert writer.note(5000, b"h" * 16, [7])
    got = []
    while not got or got[-1].num_submitted < 5000:
        got += reader.take()
        await asyncio.sleep(0)
    # The first one is the count that was kept in the socket's buffer.
    assert told(got)[1:] == [(5000, b"h" * 16, [7])]
    writer.close()


def test_one_reader_at_a_time(reader, socket_path):
    with pytest.raises(TransferError, match="another service listens"):
        NoteReader(socket_path)
