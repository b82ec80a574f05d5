import subprocess
import sys

import psutil
import pytest

CHILD = """
import os, signal, sys
from baton.runtime.process.orphans import end_with_parent
end_with_parent(int(sys.argv[1]))
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = f"""
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())])
signal.pause()
"""
# A copy of the object has no effect in the process that made it.
SPAWNING = """
import copy, multiprocessing, os, signal
from baton.runtime.process.orphans import EndsWithParent

def wait(leash):
    print(os.getpid(), flush=True)
    signal.pause()

if __name__ == "__main__":
    leash = copy.deepcopy(EndsWithParent())
    multiprocessing.get_context("spawn").Process(target=wait, args=[leash]).start()
    signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="works on Linux only")
def test_a_child_ends_with_its_killed_parent():
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        gone, _ = psutil.wait_procs([child], timeout=120)
    assert gone


@pytest.mark.skipif(sys.platform != "linux", reason="works on Linux only")
def test_a_child_exits_if_its_parent_is_already_dead():
    not_its_parent = "1"
    run = subprocess.run(
        [sys.executable, "-c", CHILD, not_its_parent], capture_output=True, timeout=120, check=False
    )
    assert run.returncode == 1
    assert not run.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="works on Linux only")
def test_a_spawned_child_ends_with_its_killed_parent(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SPAWNING)
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        gone, _ = psutil.wait_procs([child], timeout=120)
    assert gone
