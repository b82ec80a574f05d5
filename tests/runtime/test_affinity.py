import os
import subprocess
import sys

import pytest

from baton.runtime import affinity

CORES = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


def in_a_process(body: str) -> str:
    """Affinity is a process's own: never the test runner's."""
    program = f"import os, threading\nfrom baton.runtime import affinity\n{body}"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    return run.stdout.strip()


@needs_two
def test_every_thread_keeps_off():
    body = f"""
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
affinity.keep_off([{CORES[0]}])
print([sorted(os.sched_getaffinity(each)) for each in (0, thread.native_id)])
stop.set()
"""
    assert in_a_process(body) == str([CORES[1:]] * 2)


def test_keeping_off_every_core_changes_nothing():
    body = f"affinity.keep_off({CORES})\nprint(sorted(os.sched_getaffinity(0)))"
    assert in_a_process(body) == str(CORES)


def test_where_no_names_are_to_be_had_cores_are_nobodys():
    body = """
import socket
class Forbidding(socket.socket):
    def bind(self, address):
        raise PermissionError(1, "not here")
socket.socket = Forbidding
print(affinity.claim([0, 1]))
"""
    assert in_a_process(body) == "[]"


def test_cores_are_another_processs_for_as_long_as_it_lives():
    core = 100_000 + os.getpid()
    claim = f"print(affinity.claim([{core}, {core} + 1]))"
    assert affinity.claim([core]) == affinity.claim([core]) == []
    assert in_a_process(claim) == str([core])
    assert in_a_process(claim) == str([core])
    assert affinity.claim([core + 1]) == []


def test_cores_that_are_not_there_are_refused():
    with pytest.raises(OSError, match="Invalid argument"):
        affinity.run_on([CORES[-1] + 1000])
