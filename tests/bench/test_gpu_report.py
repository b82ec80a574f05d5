"""Checks of a GPU machine leave no engine on it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import psutil

from baton.bench import gpu_report

# A benchmark whose engine has a process group of its own and outlives it.
BENCHMARK = """
import subprocess, sys, time
engine = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(600)"]
started = subprocess.Popen(engine, process_group=0, stdout=subprocess.PIPE)
started.stdout.readline()
print(started.pid, flush=True)
time.sleep(600)
"""


def test_the_engines_of_a_stopped_check_end_with_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BENCHMARK],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    assert process.stdout is not None
    engine = psutil.Process(int(process.stdout.readline()))
    try:
        gpu_report._stop(process)
        assert not psutil.wait_procs([engine], 30)[1]
    finally:
        process.stdout.close()
        process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            engine.kill()


def test_outcomes_are_counted_and_failed_tests_named(tmp_path: Path) -> None:
    junit = tmp_path / "tests.xml"
    junit.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.gpu" name="good"/>
        <testcase classname="tests.gpu" name="also good"/>
        <testcase classname="tests.gpu" name="bad"><failure message="no"/></testcase>
        <testcase classname="tests.gpu" name="broken"><error message="no"/></testcase>
        <testcase classname="tests.gpu" name="elsewhere"><skipped message="no"/></testcase>
        </testsuite></testsuites>"""
    )
    assert gpu_report.outcomes(junit) == {
        "passed": 2,
        "failure": 1,
        "error": 1,
        "skipped": 1,
        "names of failed tests": ["tests.gpu::bad", "tests.gpu::broken"],
    }
