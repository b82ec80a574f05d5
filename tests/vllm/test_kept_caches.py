"""What torch has compiled for one worker is there for the next."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_programs import Program

pytestmark = pytest.mark.vllm


def test_its_cache_is_not_in_the_directory_that_goes_with_the_worker(
    tmp_path: Path, short_path: Path
) -> None:
    with Program("kept_caches_program", str(short_path), directory=tmp_path) as program:
        made = program.result()
    assert made["temporary"] == str(short_path)
    assert made["after"] == made["before"]
