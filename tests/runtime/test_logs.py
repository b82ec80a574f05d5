"""Format of a log line."""

import logging

from baton.runtime import logs


def test_a_line_has_only_the_callers_fields(capsys):
    made = logging.getLogRecordFactory()

    def marked(*args, **kwargs):
        record = made(*args, **kwargs)
        record.vllm_process_name = "MainProcess"  # As vLLM's factory does.
        return record

    logger = logging.getLogger("baton")
    before = logger.handlers[:], logger.propagate, logger.level
    logging.setLogRecordFactory(marked)
    try:
        logs.setup("info", "decode-0")
        logging.getLogger("baton.test").info("engine is up", extra={"kv": "127.0.0.1:1"})
    finally:
        logging.setLogRecordFactory(made)
        logger.handlers[:], logger.propagate = before[:2]
        logger.setLevel(before[2])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" info decode-0 baton.test engine is up kv=127.0.0.1:1")
