import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys
from baton.runtime.process import quick_exit

class Freed:
    def __del__(self):
        print("freed")

freed = Freed()
atexit.register(print, "registered before")
quick_exit.skip_cleanup(7)
atexit.register(print, "registered after")
sys.stdout.write("said\\n")
sys.exit(3)
"""


def test_skip_cleanup_keeps_the_exit_code_and_all_output():
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 7, run.stderr
    assert run.stdout.splitlines() == ["said", "registered after"]


def test_skip_cleanup_works_in_a_process_without_standard_output():
    program = PROGRAM.replace('sys.stdout.write("said\\n")', "sys.stdout = None")
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stderr) == (7, "")


INTERRUPTED = """
from baton.runtime.process import quick_exit

class Freed:
    def __del__(self):
        print("freed")

freed = Freed()
with quick_exit.skip_cleanup_if_interrupted():
    print("said")
    raise {error}
"""


@pytest.mark.parametrize(
    ("error", "printed", "code"),
    [("KeyboardInterrupt", ["said"], 130), ("SystemExit(3)", ["said", "freed"], 3)],
)
def test_only_an_interrupted_process_skips_its_cleanup(error, printed, code):
    run = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(error=error)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout.splitlines()) == (code, printed)
