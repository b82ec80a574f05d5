"""docs/metrics.md lists every metric that the processes export, and no other."""

import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.registry import Collector

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "generate_metrics.py"


@pytest.fixture
def made():
    """The generator's names."""
    return SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_the_committed_page_is_the_generated_one(made):
    assert made.PAGE.read_text() == made.generated(), "run python docs/generate_metrics.py"


def test_a_stale_page_fails_the_check(tmp_path):
    (tmp_path / SCRIPT.name).write_text(SCRIPT.read_text())
    page = tmp_path / "metrics.md"
    text = (ROOT / "docs" / "metrics.md").read_text()
    page.write_text(text.replace("`baton_elastic`", "`baton_plastic`"))
    command = [sys.executable, SCRIPT.name, "--check"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "run python docs/generate_metrics.py" in ran.stderr
    assert "`baton_plastic`" in page.read_text()


def test_the_page_has_every_collector(made):
    shown = {type(one) for process in made.processes() for one in process.collectors}
    for folder in (ROOT / "src" / "baton").iterdir():
        for path in folder.resolve().rglob("*.py") if folder.is_dir() else ():
            if "(Collector)" in path.read_text():
                module = path.relative_to(ROOT).with_suffix("").parts
                importlib.import_module(".".join(("baton", *module)))
    defined = {one for one in Collector.__subclasses__() if one.__module__.startswith("baton.")}
    assert len(defined) > 4
    assert defined == shown
