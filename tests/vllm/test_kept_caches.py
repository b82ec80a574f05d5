"""Kernels that torch compiled for one worker are cached for the next worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.vllm_programs import Program

pytestmark = pytest.mark.vllm


def test_compiled_kernels_are_outside_the_workers_directory(
    tmp_path: Path, short_path: Path
) -> None:
    with Program("kept_caches_program", str(short_path), directory=tmp_path) as program:
        made = program.result()
    assert made["temporary"] == str(short_path)
    assert made["after"] == made["before"]
