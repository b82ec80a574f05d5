"""Lines of a process's log."""

import asyncio
import io
import logging

import pytest

from baton.runtime.process import logs, output_streams


@pytest.fixture
def set_up():
    """Sets the logs up until the end of the test."""
    loggers = [logging.getLogger("baton"), logging.getLogger()]
    before = [(one.handlers[:], one.propagate, one.level) for one in loggers]
    note = output_streams.stderr.note
    yield lambda: logs.setup("info", "decode-0")
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
    output_streams.stderr.note = note


def test_a_line_has_only_the_callers_fields(capsys, set_up):
    made = logging.getLogRecordFactory()

    def marked(*args, **kwargs):
        record = made(*args, **kwargs)
        record.vllm_process_name = "MainProcess"  # As vLLM's factory does.
        return record

    logging.setLogRecordFactory(marked)
    try:
        set_up()
        logging.getLogger("baton.test").info("engine is up", extra={"kv": "127.0.0.1:1"})
    finally:
        logging.setLogRecordFactory(made)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" info decode-0 baton.test engine is up kv=127.0.0.1:1")


def test_a_record_that_a_library_writes_by_itself_is_no_line_of_the_log(capsys, set_up):
    set_up()
    library = logging.getLogger("test_logs_library")
    own, null = logging.StreamHandler(io.StringIO()), logging.NullHandler()
    own.setLevel(logging.ERROR)
    try:
        # As libraries do that leave their logs to the program.
        library.addHandler(null)
        library.getChild("part").warning("first")
        library.addHandler(own)
        library.getChild("part").warning("second")
        library.getChild("part").error("third")
    finally:
        library.removeHandler(own)
        library.removeHandler(null)
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["first", "second"]
    assert own.stream.getvalue() == "third\n"


async def test_errors_of_callbacks_are_lines_of_the_log(capsys, set_up):
    set_up()
    loop = asyncio.get_running_loop()
    loop.call_soon(int, "not a number")
    ended = asyncio.Event()
    loop.call_soon(ended.set)
    await ended.wait()
    first, *_, last = capsys.readouterr().err.splitlines()
    assert " error decode-0 asyncio Exception in callback" in first
    assert last.startswith("ValueError: ")
