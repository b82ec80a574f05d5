"""How a log line reads."""

import logging

from baton.runtime import logs


def test_fields_are_those_of_the_caller(capsys):
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
