"""Garbage collections are rare during imports, and as usual in a process that serves."""

import subprocess
import sys

PROGRAM = """
import gc
from baton.runtime.process import lifecycle, quick_start

usual = gc.get_threshold()
quick_start.collect_rarely()
assert gc.get_threshold()[0] > 10 * usual[0]

async def main():
    return 3 if gc.get_threshold() == usual else 1

raise SystemExit(lifecycle.run(main()))
"""


def test_a_process_that_serves_collects_garbage_as_usual():
    assert subprocess.run([sys.executable, "-c", PROGRAM], check=False).returncode == 3
