"""Free memory of the host and of the container."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from baton.runtime.process.free_memory import free_bytes


def test_a_containers_limit_counts(tmp_path: Path):
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    assert free_bytes(tmp_path) == 2_000_000


def test_a_container_above_its_limit_has_nothing_free(tmp_path: Path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("1000001\n")
    assert free_bytes(tmp_path) == 0


@pytest.mark.parametrize("limit", ["max\n", "", None])
def test_without_a_limit_the_hosts_memory_counts(tmp_path: Path, limit: str | None):
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
        (tmp_path / "memory.current").write_text("1000000\n")
    assert 0 < free_bytes(tmp_path) <= psutil.virtual_memory().total
