"""The demo shows a handoff, whatever the default of the placement is."""

import re
import subprocess
import sys

# Bounds hangs.
WAIT_S = 300.0


def test_the_demo_shows_a_handoff_and_leaves_no_process():
    command = [sys.executable, "-m", "baton.cli.demo", "--engine", "simulated"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(
        r"token 1 of \d+ came from prefill-0, the other tokens from decode-0", lines[-2]
    )
    assert lines[-1] == "stopped; no process is left"
