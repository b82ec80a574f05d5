"""Runs all checks of a GPU machine and writes one report.

    python -m baton.bench.gpu_report --json gpu-report.json

Needs a clone, a CUDA GPU and some ten minutes: the tests of copies and of equal tokens, the speed
of copies, one handoff, the TTFT beside plain vLLM's with and without handoffs, and a mixed load on
Baton and on two plain servers. The checks run one after the other, and the report is written after
each, so that one that fails or takes too long hides no other. The folder of the report keeps what
each has printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from baton.bench import interrupts, systems
from baton.load import stats

ROOT = Path(__file__).resolve().parents[1]
# A benchmark that is interrupted ends its servers one after the other, within a minute each.
STOP_S = 150.0
# Tests of one GPU: copies, then engines by kind of model, then a cluster.
TESTS = (
    "tests/gpu",
    "tests/vllm/test_other_models.py",
    "tests/vllm/test_same_tokens.py",
    "tests/vllm/test_drafts.py",
    "tests/vllm/test_images.py",
    "tests/vllm/test_host_tier.py",
    "tests/vllm/test_fetches.py",
)


@dataclass(frozen=True, slots=True)
class Check:
    """A program of the report.

    Attributes:
        name: Its name in the report.
        arguments: Arguments of Python.
        limit_s: Longest time in seconds.
        path: File of its figures.
        read: Reads them.
    """

    name: str
    arguments: Sequence[str]
    limit_s: float
    path: Path
    read: Callable[[Path], Any]


def checks(directory: Path, engine_args: str, num_processes: int, tests_s: float) -> list[Check]:
    """Returns all checks, in their order.

    Args:
        directory: Where they write their files.
        engine_args: Further arguments of vLLM in the benchmarks, as JSON.
        num_processes: Test processes at a time.
        tests_s: Longest time of the tests in seconds.
    """

    def bench(name: str, module: str, limit_s: float, *arguments: str) -> Check:
        path = directory / f"{name}.json"
        given = ["-m", f"baton.bench.{module}", "--json", str(path), *arguments]
        return Check(name, given, limit_s, path, lambda path: json.loads(path.read_text()))

    junit, proofs = directory / "tests.xml", directory / "proofs.json"
    pytest = ["-m", "pytest", *TESTS, "-m", "gpu or vllm", "-q"]
    # Each kind of model has engines of its own, so they can run at the same time.
    pytest += ["--numprocesses", str(num_processes), "--dist", "loadgroup"]
    pytest += ["--proofs", str(proofs), "--junitxml", str(junit)]
    # This plugin, where it is installed, warns of several processes, and warnings are errors.
    pytest += ["-p", "no:benchmark"]
    engines = ["--engine-args", engine_args]
    return [
        Check("tests", pytest, tests_s, junit, outcomes),
        bench("copies", "gpu_copies", 60),
        bench("handoff", "gpu_handoff", 60),
        bench("ttft", "gpu", 240, "--repeats", "12", *engines),
        bench("elastic-ttft", "gpu", 240, "--repeats", "12", "--elastic", *engines),
        bench("mixed", "colocated", 300, "--gpu", *engines),
    ]


def outcomes(junit: Path) -> dict[str, Any]:
    """Returns the number of tests by outcome, and the names of those that failed."""
    counted, failed = Counter[str](), []
    for case in ElementTree.parse(junit).iter("testcase"):
        states = {child.tag for child in case}
        outcome = next((one for one in ("failure", "error", "skipped") if one in states), "passed")
        counted[outcome] += 1
        if outcome in ("failure", "error"):
            failed.append(f"{case.get('classname')}::{case.get('name')}")
    return {**counted, "names of failed tests": failed}


def run(check: Check, log: Path) -> dict[str, Any]:
    """Runs a check and returns its part of the report."""
    begun = time.monotonic()
    check.path.unlink(missing_ok=True)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, *check.arguments],
            cwd=ROOT,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            ended = process.wait(check.limit_s)
            state = "ended" if ended == 0 else f"exit status {ended}"
        except subprocess.TimeoutExpired:
            state = f"longer than {check.limit_s:.0f} s"
        finally:
            _stop(process)
    made = {"state": state, "seconds": round(time.monotonic() - begun, 1)}
    try:
        return {**made, "found": check.read(check.path)}
    except (OSError, ValueError, ElementTree.ParseError) as error:
        return {**made, "found": None, "error": str(error)}


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupts a check that still runs, and ends all that it has started."""
    systems.stop(process, signal.SIGINT, STOP_S)
    # A check that has ended by itself may have left something.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def machine() -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info()
    return {
        "device": torch.cuda.get_device_name(),
        "num_devices": torch.cuda.device_count(),
        "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "vllm": importlib.metadata.version("vllm"),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [one.name for one in checks(Path("."), "{}", 1, 1)]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="which checks run")
    parser.add_argument(
        "--engine-args", default="{}", help="further arguments of vLLM in the benchmarks, as JSON"
    )
    parser.add_argument("--processes", type=int, default=6, help="test processes at a time")
    parser.add_argument("--tests-s", type=float, default=300, help="longest time of the tests")
    parser.add_argument("--json", type=Path, default=Path("bench/results/gpu-report.json"))
    given = parser.parse_args()
    if not (ROOT / "tests").is_dir():
        parser.error("the tests are in a clone of the repository: run it there")
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    return given


def main() -> None:
    given = parsed()
    interrupts.on_sigterm()
    directory = given.json.parent.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(), "checks": {}}
    for check in checks(directory, given.engine_args, given.processes, given.tests_s):
        if check.name not in given.only:
            continue
        found = report["checks"][check.name] = run(check, directory / f"{check.name}.log")
        stats.save(report, given.json)
        print(f"{check.name}: {found['state']}, {found['seconds']:.0f} s", flush=True)
    wrong = [name for name, found in report["checks"].items() if found["state"] != "ended"]
    sys.exit(f"not passed: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
