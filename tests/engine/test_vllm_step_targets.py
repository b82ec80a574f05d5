"""Targets reach vLLM's scheduler, which is in another process, through a mapped file."""

from __future__ import annotations

from pathlib import Path

from baton.engine.vllm_step_targets import TargetsReader, make_targets_file, write_targets
from baton.runtime.steps.step_budget import StepTargets


def test_a_reader_sees_each_change(tmp_path: Path) -> None:
    socket = str(tmp_path / "kv.sock")
    first = StepTargets(0.05, 0.06, 0.2)
    write_targets(socket, first)
    reader = TargetsReader(socket)
    assert reader.read() == first
    for targets in (StepTargets(0.02, 0.1, 0.3), StepTargets(), first):
        write_targets(socket, targets)
        assert reader.read() == targets


def test_the_file_of_a_starting_engine_keeps_targets_that_are_already_set(tmp_path: Path) -> None:
    socket = str(tmp_path / "kv.sock")
    make_targets_file(socket)
    assert TargetsReader(socket).read() == StepTargets()
    write_targets(socket, StepTargets(0.05, 0.06, 0.2))
    make_targets_file(socket)
    assert TargetsReader(socket).read() == StepTargets(0.05, 0.06, 0.2)
