"""How signals stop a process."""

import signal
import subprocess
import sys
import time

import pytest

# A program whose drain and cleanup never end.
STUBBORN = """
import asyncio
from baton.runtime.process import lifecycle

async def main():
    stop = lifecycle.stop_requested()
    print("runs", flush=True)
    await stop.wait()
    print("drains", flush=True)
    try:
        await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(1000)

lifecycle.run(main())
"""


# Simulates the first process of a container, for which the kernel ignores unhandled signals.
SPARED = "import signal; signal.raise_signal = lambda number: None"


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_the_process_at_once(number, is_first):
    process = subprocess.Popen(
        [sys.executable, "-c", (SPARED if is_first else "") + STUBBORN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        for said in ("runs\n", "drains\n"):
            assert process.stdout.readline() == said
            process.send_signal(number)
        _, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (128 + number if is_first else -number, "")
    finally:
        process.kill()
        process.communicate()


# A program that already stops when the signal comes, like a transfer service without its worker.
STOPPING = """
import asyncio, os, signal
from baton.runtime.process import lifecycle

async def main():
    stop = lifecycle.stop_requested()
    stop.set()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)
    print("cleaned up", flush=True)
    return 0

lifecycle.run(main())
"""


def test_a_first_signal_does_not_interrupt_a_cleanup_in_progress():
    done = subprocess.run(
        [sys.executable, "-c", STOPPING], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "cleaned up\n", "")


def test_a_process_knows_its_start_time():
    told = "from baton.runtime.process import lifecycle; print(lifecycle.process_started_at())"
    before = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", told], stdout=subprocess.PIPE, text=True)
    after = time.monotonic()
    begun_at = float(process.communicate(timeout=120)[0])
    # The kernel gives the start time in hundredths of a second.
    assert before - 0.02 <= begun_at <= after + 0.02
