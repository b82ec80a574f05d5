"""Batches and their lines in the database.

The transaction that writes the result of a line also marks the line done and counts it. So after
any end of the process a line either has its one result, or runs again.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from dataclasses import dataclass
from typing import Any

from openai.types import Batch, BatchError, BatchRequestCounts, BatchUsage
from openai.types.batch import Errors
from openai.types.batch_usage import InputTokensDetails, OutputTokensDetails

from baton.gateway.batches.database import Database
from baton.gateway.batches.file_store import StoreFull, chunk, is_fair, new_id, page_of
from baton.gateway.batches.input_file import InputLine, InputParser, WrongFile
from baton.gateway.batches.route_call import Answer
from baton.gateway.batches.status import TRANSITIONS, Status, advance
from baton.runtime.config import BatchesConfig

# The only completion window of OpenAI's API.
WINDOW, WINDOW_S = "24h", 86_400
# Lines of a batch that are read at a time.
_LINES_AT_ONCE, _BYTES_AT_ONCE = 64, 2**20

# OpenAI's error of the lines that were not executed, by the state in which the batch ended.
_NOT_EXECUTED = {
    Status.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    Status.CANCELLED: (
        "batch_cancelled",
        "This request was not executed before the batch was cancelled.",
    ),
}
# Fields of Batch with a column of the same name.
_FIELDS = tuple(
    name
    for name in Batch.model_fields
    if name not in ("object", "errors", "metadata", "request_counts", "usage")
)


@dataclass(frozen=True, slots=True)
class NewBatch:
    """A batch as its client creates it; `output_expires_s`: seconds for which results are kept."""

    owner: bytes
    authorization: str
    tenant: str
    endpoint: str
    input_file_id: str
    num_input_bytes: int
    metadata: dict[str, str] | None
    output_expires_s: int


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that has not ended, as the runner needs it."""

    id: str
    owner: bytes
    authorization: str
    tenant: str
    endpoint: str
    input_file_id: str
    status: Status


@dataclass(frozen=True, slots=True)
class Line:
    """A line that has no result yet; `body` is the request as JSON."""

    number: int
    custom_id: str
    body: bytes
    model_number: int


class BatchStore:
    """Reads and writes batches. All methods use the database's thread; `now` is Unix time.

    Args:
        database: The database.
        config: Limits.
    """

    def __init__(self, database: Database, config: BatchesConfig) -> None:
        self._database, self._config = database, config

    # ---- For clients

    def create(self, new: NewBatch, now: int) -> OpenBatch:
        """Creates a batch, which is then validated. Raises StoreFull."""
        batch_id = new_id("batches")
        with self._database.transaction() as db:
            self._make_place(db, new.owner)
            db.execute(
                "INSERT INTO batches (id, owner, authorization, tenant, endpoint, input_file_id, "
                "completion_window, metadata, status, created_at, expires_at, output_expires_s, "
                "line_bytes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    batch_id,
                    new.owner,
                    new.authorization,
                    new.tenant,
                    new.endpoint,
                    new.input_file_id,
                    WINDOW,
                    json.dumps(new.metadata) if new.metadata is not None else None,
                    Status.VALIDATING,
                    now,
                    now + WINDOW_S,
                    new.output_expires_s,
                    new.num_input_bytes,
                ),
            )
            return _open_batch(_row(db, batch_id))

    def find(self, owner: bytes, batch_id: str) -> Batch | None:
        """Returns a batch of this owner; None if there is none."""
        with self._database.transaction() as db:
            row = db.execute(
                "SELECT * FROM batches WHERE owner = ? AND id = ?", (owner, batch_id)
            ).fetchone()
        return _batch_object(row) if row is not None else None

    def page(self, owner: bytes, after: str | None, limit: int) -> tuple[list[Batch], bool]:
        """Returns a page of the owner's batches, newest first, and whether more follow.

        Raises:
            LookupError: `after` is no ID of a batch.
        """
        with self._database.transaction() as db:
            found, more = page_of(db, "batches", owner, after, limit)
        return [_batch_object(row) for row in found], more

    def begin_cancel(self, batch_id: str, now: int) -> bool:
        """Marks an open batch as cancelling; returns whether it was open before."""
        with self._database.transaction() as db:
            status = Status(_row(db, batch_id)["status"])
            if Status.CANCELLING in TRANSITIONS[status]:
                _advance(db, batch_id, Status.CANCELLING, now)
        return status.is_open

    # ---- For the runner

    def open_batches(self) -> list[OpenBatch]:
        with self._database.transaction() as db:
            found = db.execute(
                "SELECT * FROM batches WHERE delete_at IS NULL ORDER BY seq"
            ).fetchall()
        return [_open_batch(row) for row in found]

    def begin_validation(self, batch_id: str) -> None:
        """Drops the lines of a validation that was interrupted."""
        with self._database.transaction() as db:
            db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))

    def read_input(self, batch: OpenBatch, parser: InputParser, number: int) -> bool:
        """Parses a chunk of the input file and adds its lines.

        Returns:
            Whether there may be more chunks.

        Raises:
            WrongFile: The file has too many lines, or was deleted.
        """
        with self._database.transaction() as db:
            # Without the file, the next chunk is missing as after the last one.
            file = db.execute("SELECT 1 FROM files WHERE id = ?", (batch.input_file_id,))
            if file.fetchone() is None:
                raise WrongFile(
                    "input_file_deleted", "the input file was deleted before all lines were read"
                )
            data = chunk(db, batch.input_file_id, number)
            for line in parser.feed(data or b"", last=data is None):
                _add_line(db, batch.id, line)
        return data is not None

    def begin_lines(self, batch_id: str, now: int) -> int:
        """Ends the validation, unless the batch was cancelled meanwhile.

        Returns:
            The number of wrong lines.

        Raises:
            WrongFile: There are no lines.
        """
        with self._database.transaction() as db:
            total, failed = db.execute(
                "SELECT count(*), count(result) FROM lines WHERE batch_id = ?", (batch_id,)
            ).fetchone()
            if not total:
                raise WrongFile("empty_batch", "the input file has no lines")
            if not _is_validating(db, batch_id):
                return 0
            _advance(db, batch_id, Status.IN_PROGRESS, now)
            db.execute(
                "UPDATE batches SET total = ?, failed = ? WHERE id = ?", (total, failed, batch_id)
            )
        return int(failed)

    def fail(self, batch_id: str, problem: WrongFile, now: int) -> None:
        """Ends a batch whose input file cannot be used."""
        errors = Errors(
            object="list", data=[BatchError(code=problem.code, message=str(problem))]
        ).model_dump_json()
        with self._database.transaction() as db:
            if not _is_validating(db, batch_id):
                return
            _advance(db, batch_id, Status.FAILED, now)
            db.execute("UPDATE batches SET errors = ? WHERE id = ?", (errors, batch_id))
            db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
            self._end(db, batch_id, now)

    def model_numbers(self, batch_id: str) -> list[int]:
        """Returns the numbers of the models of the lines without a result."""
        with self._database.transaction() as db:
            found = db.execute(
                "SELECT DISTINCT model_number FROM lines WHERE batch_id = ? AND result IS NULL",
                (batch_id,),
            ).fetchall()
        return [row["model_number"] for row in found]

    def next_lines(self, batch_id: str, model_number: int, after: int) -> list[Line]:
        """Returns some of a model's lines without a result after a line; [] after the last."""
        found, num_bytes = list[Line](), 0
        with self._database.transaction() as db:
            rows = db.execute(
                "SELECT number, custom_id, body, model_number FROM lines WHERE batch_id = ? "
                "AND number > ? AND model_number = ? AND result IS NULL ORDER BY number LIMIT ?",
                (batch_id, after, model_number, _LINES_AT_ONCE),
            )
            for row in rows:
                found.append(Line(*row))
                num_bytes += len(row["body"])
                if num_bytes > _BYTES_AT_ONCE:
                    break
            rows.close()
        return found

    def record(self, batch_id: str, line: Line, answer: Answer) -> bool:
        """Writes the result of a line, once; returns whether it succeeded."""
        body = json.loads(answer.body)
        succeeded = answer.status == 200
        response = {
            "status_code": answer.status,
            "request_id": answer.request_id,
            "body": body,
        }
        usage = _usage(body) if succeeded else (0, 0, 0, 0)
        result = _result(line.custom_id, response, None)
        with self._database.transaction() as db:
            done = db.execute(
                "UPDATE lines SET result = ?, succeeded = ?, body = x'' "
                "WHERE batch_id = ? AND number = ? AND result IS NULL",
                (result, succeeded, batch_id, line.number),
            )
            if done.rowcount:
                db.execute(
                    "UPDATE batches SET completed = completed + ?, failed = failed + ?, "
                    "input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?, "
                    "output_tokens = output_tokens + ?, reasoning_tokens = reasoning_tokens + ?, "
                    "line_bytes = line_bytes + ? WHERE id = ?",
                    (
                        succeeded,
                        not succeeded,
                        *usage,
                        len(result) - len(line.body),
                        batch_id,
                    ),
                )
        return succeeded

    def finish(self, batch_id: str, status: Status, now: int) -> None:
        """Ends a batch as completed, expired or cancelled, with its result files.

        A batch that is cancelling becomes cancelled in any case; one that has ended stays as it is.
        """
        with self._database.transaction() as db:
            row = _row(db, batch_id)
            current = Status(row["status"])
            if not current.is_open:
                return
            if current is Status.CANCELLING:
                status = Status.CANCELLED
            if row["in_progress_at"] is None:
                # The validation has not ended: the lines are not counted.
                db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
            if status in _NOT_EXECUTED:
                _fail_rest(db, batch_id, *_NOT_EXECUTED[status])
            else:
                _advance(db, batch_id, Status.FINALIZING, now)
            _advance(db, batch_id, status, now)
            for succeeded, column in ((True, "output_file_id"), (False, "error_file_id")):
                file_id = _add_result_file(db, row, succeeded, now)
                db.execute(f"UPDATE batches SET {column} = ? WHERE id = ?", (file_id, batch_id))
            self._end(db, batch_id, now)

    def due(self, now: int) -> list[str]:
        """Returns the IDs of open batches whose completion window is over."""
        with self._database.transaction() as db:
            found = db.execute(
                "SELECT id FROM batches WHERE delete_at IS NULL AND expires_at <= ? "
                "AND status != ?",
                (now, Status.CANCELLING),
            ).fetchall()
        return [row["id"] for row in found]

    def delete_old(self, now: int) -> None:
        """Deletes ended batches that are old and have no result files any more."""
        with self._database.transaction() as db:
            db.execute(
                "DELETE FROM batches WHERE delete_at <= ? "
                "AND NOT EXISTS (SELECT 1 FROM files WHERE batch_id = batches.id)",
                (now,),
            )

    def _make_place(self, db: sqlite3.Connection, owner: bytes) -> None:
        """Deletes ended batches without result files, if this caller can have no batch otherwise.

        Only batches of this caller and of callers with more batches are deleted, oldest first.
        Raises StoreFull, and deletes nothing, if that is not enough.
        """
        count, own = db.execute(
            "SELECT count(*), count(*) FILTER (WHERE owner = ?) FROM batches", (owner,)
        ).fetchone()
        num_own, num_free = own + 1, self._config.max_files - count - 1
        if is_fair(num_own, num_free):
            return
        deleted = []
        for row in db.execute(
            "SELECT seq, owner FROM batches WHERE delete_at IS NOT NULL "
            "AND NOT EXISTS (SELECT 1 FROM files WHERE batch_id = batches.id) "
            "AND owner IN (SELECT owner FROM batches GROUP BY owner "
            "HAVING owner = ? OR count(*) > ?) ORDER BY seq",
            (owner, own),
        ).fetchall():
            deleted.append(row["seq"])
            num_own -= row["owner"] == owner
            num_free += 1
            if is_fair(num_own, num_free):
                break
        else:
            raise StoreFull(
                f"{count} batches are kept, {own} of them of this caller; at most "
                f"{self._config.max_files} (http.batches.max_files) for all callers: delete "
                "the result files of ended batches"
            )
        db.execute(
            "DELETE FROM batches WHERE seq IN (SELECT value FROM json_each(?))",
            (json.dumps(deleted),),
        )

    def _end(self, db: sqlite3.Connection, batch_id: str, now: int) -> None:
        db.execute(
            "UPDATE batches SET authorization = NULL, delete_at = ? WHERE id = ?",
            (now + round(self._config.expires_s), batch_id),
        )


def _row(db: sqlite3.Connection, batch_id: str) -> sqlite3.Row:
    row: sqlite3.Row = db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return row


def _is_validating(db: sqlite3.Connection, batch_id: str) -> bool:
    return bool(_row(db, batch_id)["status"] == Status.VALIDATING)


def _advance(db: sqlite3.Connection, batch_id: str, status: Status, now: int) -> None:
    """Changes the state, with the time in the column of that state."""
    advance(Status(_row(db, batch_id)["status"]), status)
    db.execute(
        f"UPDATE batches SET status = ?, {status}_at = ? WHERE id = ?", (status, now, batch_id)
    )


def _add_line(db: sqlite3.Connection, batch_id: str, line: InputLine) -> None:
    result = None
    if line.code:
        error = BatchError(code=line.code, line=line.number, message=line.message, param=line.param)
        result = _result(line.custom_id, None, error.model_dump())
    db.execute(
        "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            batch_id,
            line.number,
            line.custom_id,
            line.body,
            result,
            False if result is not None else None,
            line.model_number,
        ),
    )
    if line.model is not None:
        db.execute(
            "UPDATE batches SET model = ? WHERE id = ? AND model IS NULL", (line.model, batch_id)
        )


def _result(
    custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    """Returns a line of a result file or error file, in OpenAI's form."""
    found = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return json.dumps(found).encode() + b"\n"


def _fail_rest(db: sqlite3.Connection, batch_id: str, code: str, message: str) -> None:
    """Gives all lines without a result this error."""
    rest = db.execute(
        "SELECT number, custom_id FROM lines WHERE batch_id = ? AND result IS NULL", (batch_id,)
    ).fetchall()
    error = {"code": code, "message": message}
    db.executemany(
        "UPDATE lines SET result = ?, succeeded = 0, body = x'' WHERE batch_id = ? AND number = ?",
        ((_result(row["custom_id"], None, error), batch_id, row["number"]) for row in rest),
    )
    db.execute("UPDATE batches SET failed = failed + ? WHERE id = ?", (len(rest), batch_id))


def _add_result_file(
    db: sqlite3.Connection, batch: sqlite3.Row, succeeded: bool, now: int
) -> str | None:
    """Adds the file of the lines that succeeded, or of the others; None if there are none."""
    (num_bytes,) = db.execute(
        "SELECT sum(length(result)) FROM lines WHERE batch_id = ? AND succeeded = ?",
        (batch["id"], succeeded),
    ).fetchone()
    if num_bytes is None:
        return None
    file_id = new_id("files")
    name = f"{batch['id']}_{'output' if succeeded else 'error'}.jsonl"
    db.execute(
        "INSERT INTO files (id, owner, filename, purpose, bytes, created_at, expires_at, batch_id, "
        "succeeded) VALUES (?, ?, ?, 'batch_output', ?, ?, ?, ?, ?)",
        (
            file_id,
            batch["owner"],
            name,
            num_bytes,
            now,
            now + batch["output_expires_s"],
            batch["id"],
            succeeded,
        ),
    )
    return file_id


def _usage(body: dict[str, Any]) -> tuple[int, int, int, int]:
    """Returns input, cached, output and reasoning tokens of a response.

    Chats and completions have other names for them than responses and messages. The input tokens
    of a message are without those that were read from a cache or written to one.
    """
    usage = body.get("usage") or {}
    inputs = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    outputs = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    read = usage.get("cache_read_input_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    return (
        usage.get("prompt_tokens", usage.get("input_tokens", 0)) + read + written,
        inputs.get("cached_tokens", 0) + read,
        usage.get("completion_tokens", usage.get("output_tokens", 0)),
        outputs.get("reasoning_tokens", 0),
    )


def _open_batch(row: sqlite3.Row) -> OpenBatch:
    return OpenBatch(
        row["id"],
        row["owner"],
        row["authorization"],
        row["tenant"],
        row["endpoint"],
        row["input_file_id"],
        Status(row["status"]),
    )


def _batch_object(row: sqlite3.Row) -> Batch:
    inputs, outputs = row["input_tokens"], row["output_tokens"]
    return Batch(
        object="batch",
        errors=Errors.model_validate_json(row["errors"]) if row["errors"] is not None else None,
        metadata=json.loads(row["metadata"]) if row["metadata"] is not None else None,
        request_counts=BatchRequestCounts(
            total=row["total"], completed=row["completed"], failed=row["failed"]
        ),
        usage=BatchUsage(
            input_tokens=inputs,
            input_tokens_details=InputTokensDetails(cached_tokens=row["cached_tokens"]),
            output_tokens=outputs,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=row["reasoning_tokens"]),
            total_tokens=inputs + outputs,
        ),
        **{name: row[name] for name in _FIELDS},
    )
