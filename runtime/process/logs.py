"""Logging: one line per record on stderr, with `key=value` fields after the message."""

from __future__ import annotations

import logging
from typing import ClassVar

from baton.runtime.process import output_streams


class _Formatter(logging.Formatter):
    """`2026-01-01T12:00:00.123 level process logger message key=value`; fields from `extra`."""

    _STANDARD: ClassVar[frozenset[str]] = frozenset(
        logging.LogRecord("", 0, "", 0, "", None, None).__dict__
    ) | {"message", "asctime", "taskName"}

    def __init__(self, process: str) -> None:
        super().__init__(datefmt="%Y-%m-%dT%H:%M:%S")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        # vLLM's record factory adds its fields to every record of the process.
        fields = "".join(
            f" {key}={value}"
            for key, value in vars(record).items()
            if key not in self._STANDARD and not key.startswith(("vllm_", "_ray_"))
        )
        line = (
            f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d} "
            f"{record.levelname.lower()} {self._process} {record.name} "
            f"{record.getMessage()}{fields}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class _Handler(logging.Handler):
    """Writes records to stderr; a paused reader of stderr does not block it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            output_streams.stderr.write(f"{self.format(record)}\n")
        except Exception:
            # As logging's own handlers: a record that cannot be formatted ends no caller.
            self.handleError(record)


def _is_handled_elsewhere(record: logging.LogRecord) -> bool:
    """Whether a handler below the root logger takes the record, so that it is written already."""
    logger: object = logging.root.manager.loggerDict.get(record.name)
    while isinstance(logger, logging.Logger) and logger is not logging.root:
        for handler in logger.handlers:
            # A library's NullHandler leaves the choice of the handler to the program.
            if not isinstance(handler, logging.NullHandler) and record.levelno >= handler.level:
                return True
        logger = logger.parent
    return False


def setup(level: str, process: str) -> None:
    """Sends this process's logs to stderr, with warnings and errors of libraries.

    While stderr is not read, log lines wait in memory; later ones replace the oldest, and a line
    tells how many were dropped.

    Args:
        level: "debug", "info", "warning" or "error".
        process: Name of this process in each line: "coordinator", or a worker's ID.
    """
    handler, others, formatter = _Handler(), _Handler(logging.WARNING), _Formatter(process)
    for one in (handler, others):
        one.setFormatter(formatter)
    others.addFilter(lambda record: not _is_handled_elsewhere(record))

    def note(num_lines: int) -> str:
        text = "%d log lines dropped, because stderr was not read"
        record = logging.makeLogRecord(
            {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
            | {"msg": text, "args": (num_lines,)}
        )
        return f"{formatter.format(record)}\n"

    output_streams.stderr.note = note
    logger = logging.getLogger("baton")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    # Python itself would write these records to stderr, and block the event loop: for example
    # errors of asyncio's callbacks and of gRPC's handlers.
    logging.getLogger().handlers[:] = [others]


def adopt(library: str, level: int) -> None:
    """Sends a library's log lines of this level and above where Baton's go; call after `setup`."""
    logger = logging.getLogger(library)
    logger.handlers[:] = logging.getLogger("baton").handlers
    logger.setLevel(level)
    logger.propagate = False
