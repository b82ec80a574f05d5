"""A start that is interrupted, as by Ctrl-C during loading, starts no more processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.vllm_programs import Program

pytestmark = pytest.mark.vllm


def test_an_engine_that_is_stopped_while_it_is_configured_starts_no_process(tmp_path: Path) -> None:
    """Otherwise the worker's process could not end before the engine had loaded."""
    with Program("interrupted_start_program", directory=tmp_path) as program:
        assert program.result() == 0
