"""Fixtures for all tests: each test must leave its process unchanged, so that order is free."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Set like in the `baton` command, and before any test imports gRPC, which reads it at import.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# Time limits per example are off, because a busy machine is not a defect.
settings.register_profile("baton", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("baton")

_OURS = ("BATON_", "GRPC_")
# Tests in this folder start many processes each and mostly wait for them.
_MANY_PROCESSES, _MOST_AT_ONCE = "tests/cluster/", 1
# This folder is one unit of work and starts first: its files share processes and take longest.
_VLLM = "tests/vllm/"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes a test that takes a `seed` by its mark, or by BATON_SEEDS."""
    if (mark := metafunc.definition.get_closest_marker("seeds")) is not None:
        metafunc.parametrize("seed", range(int(os.environ.get("BATON_SEEDS", mark.args[0]))))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Adds to a failed test how to run its seed again."""
    report = yield
    if report.failed and "seed" in getattr(item, "callspec", item).__dict__.get("params", {}):
        seed = item.callspec.params["seed"]
        again = f"BATON_SEEDS={seed + 1} pytest '{item.nodeid}'"
        report.sections.append((f"seed {seed}", f"run it again: {again}"))
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distributes test files; at most _MOST_AT_ONCE files with many processes run at a time."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _VLLM if nodeid.startswith(_VLLM) else super()._split_scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            many = self.nodes.index(node) < _MOST_AT_ONCE
            for scope in sorted(self.workqueue, key=lambda scope: scope != _VLLM):
                if scope.startswith(_MANY_PROCESSES) == many:
                    self.workqueue.move_to_end(scope, last=False)
                    break
            else:
                if not many:
                    # Only files with many processes are left, and their workers run them.
                    node.shutdown()
                    return
            super()._assign_work_unit(node)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def _state() -> dict[str, object]:
    """State of the process that a test could leave changed."""
    loggers = [logging.getLogger(name) for name in ("baton", "uvicorn")]
    return {
        "loggers": [(one.handlers[:], one.level, one.propagate) for one in loggers],
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(_OURS)
        },
        "directory": os.getcwd(),
        "signals": [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)],
        "cores": os.sched_getaffinity(0),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "frozen objects": gc.get_freeze_count() > 0,
    }


@pytest.fixture(autouse=True)
def nothing_is_left_to_the_next_test() -> Iterator[None]:
    before = _state()
    yield
    after = _state()
    left = {what: after[what] for what in before if after[what] != before[what]}
    assert not left, f"the test has changed its process: {left}"


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for Unix sockets; `tmp_path` may exceed the 107 bytes of a socket path."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        yield Path(directory)
