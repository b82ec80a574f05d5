import os
import subprocess
import sys

import pytest

from baton.runtime.process import affinity

CORES = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def in_a_process(body: str) -> str:
    """Runs the code in its own process, because it changes the affinity of its process."""
    program = f"import os, threading\nfrom baton.runtime.process import affinity\n{body}"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return run.stdout.strip()


@needs_two
def test_every_thread_moves_off_the_cores():
    body = f"""
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
affinity.avoid_cores([{CORES[0]}])
print([sorted(os.sched_getaffinity(each)) for each in (0, thread.native_id)])
stop.set()
"""
    assert in_a_process(body) == str([CORES[1:]] * 2)


def test_moving_off_every_core_changes_nothing():
    body = f"affinity.avoid_cores({CORES})\nprint(sorted(os.sched_getaffinity(0)))"
    assert in_a_process(body) == str(CORES)


def test_without_abstract_socket_names_no_core_is_claimed():
    body = """
import socket
class Forbidding(socket.socket):
    def bind(self, address):
        raise PermissionError(1, "not here")
socket.socket = Forbidding
print(affinity.claim_cores([0, 1]))
"""
    assert in_a_process(body) == "[]"


def test_a_core_stays_claimed_as_long_as_its_process_lives():
    core = 100_000 + os.getpid()
    claim = f"print(affinity.claim_cores([{core}, {core} + 1]))"
    assert affinity.claim_cores([core]) == affinity.claim_cores([core]) == []
    assert in_a_process(claim) == str([core])
    assert in_a_process(claim) == str([core])
    assert affinity.claim_cores([core + 1]) == []


def test_missing_cores_are_an_error():
    with pytest.raises(OSError, match="Invalid argument"):
        affinity.pin_to([CORES[-1] + 1000])
