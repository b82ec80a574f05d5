"""The wheel contains `baton bench`, `replay` and `simulate`, but not the benchmarks in bench/."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")


def test_the_wheel_carries_load_and_simulator_and_no_benchmarks(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    packages = [link.resolve() for link in (ROOT / "src" / "baton").iterdir() if link.is_symlink()]
    names = {path.relative_to(ROOT).parts[0] for path in packages}
    for name in (*SOURCES, *names):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True)
        else:
            shutil.copy(path, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    built = subprocess.run(
        [*command, "--quiet", "--no-index", "--wheel-dir", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
    assert {"baton/load/generator.py", "baton/simulator/run.py"} <= set(files)
    assert not [name for name in files if name.startswith("baton/bench/")]
    assert not [name for name in files if name.startswith(("bench/", "tests/"))]
