"""Files of OpenAI's Files API in the database: uploads, and results of batches."""

from __future__ import annotations

import re
import secrets
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass

from openai.types import FileObject

from baton.gateway.batches.database import Database
from baton.gateway.batches.status import Status
from baton.runtime.config import BatchesConfig

# Bytes of an upload that are written or read at a time.
CHUNK_BYTES = 256 * 2**10
# Free space of the disk that is never used: SQLite needs some even to delete.
RESERVE_BYTES = 64 * 2**20
# A caller may have at most this many times what stays free of a limit, so that no caller takes all.
_SHARE = 3
# Result lines that are read at a time, and the bytes after which no further line is read.
_RESULTS_AT_ONCE, RESULT_BYTES_AT_ONCE = 256, 2**20

_PREFIXES = {"files": "file-", "batches": "batch_"}


class StoreFull(Exception):
    """A limit of the store is reached for a caller; the message names its configuration key."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a file's content.

    Attributes:
        data: The bytes.
        next: Position of the next part.
    """

    data: bytes
    next: int


@dataclass(slots=True)
class _RunningUpload:
    owner: bytes
    num_bytes: int
    num_unwritten_bytes: int


class FileStore:
    """Reads and writes files. All methods use the database's thread.

    Args:
        database: The database.
        config: Limits.
    """

    def __init__(self, database: Database, config: BatchesConfig) -> None:
        self._database, self._config = database, config
        self._uploads: dict[str, _RunningUpload] = {}
        # Whether there may be chunks of uploads that failed, in this process or the last one.
        self._may_have_orphans = True

    def begin_upload(self, file_id: str, owner: bytes, num_bytes: int) -> None:
        """Reserves room for a new file until `finish_upload` or `drop_upload`. Raises StoreFull."""
        with self._database.transaction() as db:
            count, own = db.execute(
                "SELECT count(*), count(*) FILTER (WHERE owner = ?) FROM files "
                "WHERE batch_id IS NULL",
                (owner,),
            ).fetchone()
        count += len(self._uploads)
        own += sum(one.owner == owner for one in self._uploads.values())
        if not is_fair(own + 1, self._config.max_files - count - 1):
            raise StoreFull(
                f"{count} files are kept, {own} of them of this caller; at most "
                f"{self._config.max_files} (http.batches.max_files) for all callers: delete files"
            )
        self.check_room(owner, num_bytes)
        self._uploads[file_id] = _RunningUpload(owner, num_bytes, num_bytes)

    def add_chunk(self, file_id: str, number: int, data: bytes) -> None:
        """Adds the next part of an upload. Raises StoreFull."""
        upload = self._uploads[file_id]
        if self._is_full:
            raise StoreFull("http.batches.max_bytes or the disk of http.batches.dir is full")
        with self._database.transaction() as db:
            db.execute("INSERT INTO chunks VALUES (?, ?, ?)", (file_id, number, data))
        upload.num_unwritten_bytes -= len(data)

    def is_full_for(self, owner: bytes) -> bool:
        """Whether this caller's batches must wait for room."""
        own = self._own_bytes(owner)
        return self._is_full or not is_fair(own, self._config.max_bytes - own)

    def check_room(self, owner: bytes, num_bytes: int) -> None:
        """Raises StoreFull if this many bytes of a caller do not fit."""
        with self._database.transaction() as db:
            # The lines of these batches are not written yet.
            (coming,) = db.execute(
                "SELECT coalesce(sum(line_bytes), 0) FROM batches "
                "WHERE delete_at IS NULL AND status = ?",
                (Status.VALIDATING,),
            ).fetchone()
        coming += sum(upload.num_unwritten_bytes for upload in self._uploads.values())
        own = self._own_bytes(owner)
        used, limit = self._database.num_bytes + coming, self._config.max_bytes
        free = self._database.num_free_bytes - coming
        for left, told in (
            (
                limit - used,
                f"files and results use {used} bytes; at most {limit} (http.batches.max_bytes)",
            ),
            (
                free - RESERVE_BYTES,
                f"the disk of http.batches.dir has {free} bytes free; {RESERVE_BYTES} must stay",
            ),
        ):
            if not is_fair(own + num_bytes, left - num_bytes):
                raise StoreFull(f"{told}; this caller has {own}: delete files")

    @property
    def _is_full(self) -> bool:
        database = self._database
        return (
            database.num_bytes > self._config.max_bytes or database.num_free_bytes < RESERVE_BYTES
        )

    def _own_bytes(self, owner: bytes) -> int:
        """Size of a caller's files, running uploads, and lines of open batches."""
        with self._database.transaction() as db:
            (stored,) = db.execute(
                "SELECT (SELECT coalesce(sum(bytes), 0) FROM files WHERE owner = ?) + "
                "(SELECT coalesce(sum(line_bytes), 0) FROM batches "
                "WHERE owner = ? AND delete_at IS NULL)",
                (owner, owner),
            ).fetchone()
        uploads = self._uploads.values()
        return int(stored) + sum(one.num_bytes for one in uploads if one.owner == owner)

    def finish_upload(self, owner: bytes, file: FileObject) -> None:
        """Makes an upload visible to its owner."""
        with self._database.transaction() as db:
            db.execute(
                "INSERT INTO files (id, owner, filename, purpose, bytes, created_at, expires_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    file.id,
                    owner,
                    file.filename,
                    file.purpose,
                    file.bytes,
                    file.created_at,
                    file.expires_at,
                ),
            )
        self._uploads.pop(file.id, None)

    def drop_upload(self, file_id: str) -> None:
        """Ends an upload that failed, and deletes its chunks."""
        self._uploads.pop(file_id, None)
        self._may_have_orphans = True
        self.delete_orphans()

    def delete_orphans(self) -> None:
        """Deletes the chunks of uploads that failed."""
        if not self._may_have_orphans:
            return
        with self._database.transaction() as db:
            found = db.execute(
                "SELECT DISTINCT file_id FROM chunks WHERE file_id NOT IN (SELECT id FROM files)"
            ).fetchall()
            orphans = [(row["file_id"],) for row in found if row["file_id"] not in self._uploads]
            db.executemany("DELETE FROM chunks WHERE file_id = ?", orphans)
        self._may_have_orphans = False

    def find(self, owner: bytes, file_id: str, now: int) -> FileObject | None:
        """Returns a file of this owner; None if there is none, or not any more."""
        with self._database.transaction() as db:
            row = _row(db, owner, file_id)
        return _file_object(row) if row is not None and row["expires_at"] > now else None

    def page(
        self,
        owner: bytes,
        after: str | None,
        limit: int,
        now: int,
        *,
        purpose: str | None = None,
        ascending: bool = False,
    ) -> tuple[list[FileObject], bool]:
        """Returns a page of the owner's files, and whether more follow.

        Raises:
            LookupError: `after` is no ID of a file.
        """
        where, values = "expires_at > ?", list[object]([now])
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        with self._database.transaction() as db:
            found, more = page_of(db, "files", owner, after, limit, where, values, ascending)
        return [_file_object(row) for row in found], more

    def read(self, owner: bytes, file_id: str, position: int) -> Part | None:
        """Returns the part of the content at a position.

        Args:
            owner: Owner of the file.
            file_id: The file.
            position: 0, or `next` of the part before.

        Returns:
            The part, empty at the end; None if there is no such file.
        """
        with self._database.transaction() as db:
            row = _row(db, owner, file_id)
            if row is None:
                return None
            if row["batch_id"] is None:
                data = chunk(db, file_id, position)
                return Part(data or b"", position + 1)
            rows = db.execute(
                "SELECT number, result FROM lines WHERE batch_id = ? AND number > ? "
                "AND succeeded = ? ORDER BY number LIMIT ?",
                (row["batch_id"], position, row["succeeded"], _RESULTS_AT_ONCE),
            )
            found = bytearray()
            for line in rows:
                found += line["result"]
                position = line["number"]
                if len(found) > RESULT_BYTES_AT_ONCE:
                    break
            rows.close()
        return Part(bytes(found), position)

    def delete(self, owner: bytes, file_id: str) -> bool:
        """Deletes a file; returns whether there was one."""
        with self._database.transaction() as db:
            row = _row(db, owner, file_id)
            if row is not None:
                _delete(db, row)
        return row is not None

    def delete_expired(self, now: int) -> None:
        with self._database.transaction() as db:
            for row in db.execute("SELECT * FROM files WHERE expires_at <= ?", (now,)).fetchall():
                _delete(db, row)


def is_fair(own: int, left: int) -> bool:
    """Whether a caller may have this much of a limit of which this much stays free."""
    return own <= _SHARE * left


def new_id(table: str) -> str:
    """Returns an ID for a row of `files` or `batches`: the system clock in ns, and 4 random bytes.

    IDs of databases of version 1 are random throughout.
    """
    return f"{_PREFIXES[table]}{time.time_ns():016x}{secrets.token_hex(4)}"


def chunk(db: sqlite3.Connection, file_id: str, number: int) -> bytes | None:
    """Returns a chunk of an uploaded file; None after the last one."""
    row = db.execute(
        "SELECT data FROM chunks WHERE file_id = ? AND number = ?", (file_id, number)
    ).fetchone()
    return row["data"] if row is not None else None


def page_of(
    db: sqlite3.Connection,
    table: str,
    owner: bytes,
    after: str | None,
    limit: int,
    where: str = "TRUE",
    values: Sequence[object] = (),
    ascending: bool = False,
) -> tuple[Sequence[sqlite3.Row], bool]:
    """Returns a page of an owner's rows in the order of their creation, and whether more follow.

    `where` is a condition with `values` for its parameters. If the row of `after` is deleted, the
    time in its ID says where the page begins.

    Raises:
        LookupError: `after` is no ID of such a row.
    """
    where, values = f"owner = ? AND {where}", [owner, *values]
    if after is not None:
        if not re.fullmatch(f"{_PREFIXES[table]}[0-9a-f]{{24}}", after):
            raise LookupError(after)
        last = db.execute(
            f"SELECT seq FROM {table} WHERE owner = ? AND id = ?", (owner, after)
        ).fetchone()
        sign = ">" if ascending else "<"
        if last is not None:
            where, values = f"{where} AND seq {sign} ?", [*values, last["seq"]]
        else:
            created_at = int(after.removeprefix(_PREFIXES[table])[:16], 16) // 10**9
            where = f"{where} AND (created_at, id) {sign} (?, ?)"
            values = [*values, created_at, after]
    found = db.execute(
        f"SELECT * FROM {table} WHERE {where} ORDER BY seq {'ASC' if ascending else 'DESC'} "
        "LIMIT ?",
        [*values, limit + 1],
    ).fetchall()
    return found[:limit], len(found) > limit


def _row(db: sqlite3.Connection, owner: bytes, file_id: str) -> sqlite3.Row | None:
    found: sqlite3.Row | None = db.execute(
        "SELECT * FROM files WHERE owner = ? AND id = ?", (owner, file_id)
    ).fetchone()
    return found


def _delete(db: sqlite3.Connection, row: sqlite3.Row) -> None:
    db.execute("DELETE FROM chunks WHERE file_id = ?", (row["id"],))
    if row["batch_id"] is not None:
        # The content of a result file is in the lines.
        db.execute(
            "DELETE FROM lines WHERE batch_id = ? AND succeeded = ?",
            (row["batch_id"], row["succeeded"]),
        )
    db.execute("DELETE FROM files WHERE id = ?", (row["id"],))


def _file_object(row: sqlite3.Row) -> FileObject:
    return FileObject(
        id=row["id"],
        object="file",
        bytes=row["bytes"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        filename=row["filename"],
        purpose=row["purpose"],
        status="processed",
    )
