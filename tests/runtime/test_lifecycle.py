"""How a process is asked to stop."""

import signal
import subprocess
import sys
import time

import pytest

# Drains for ever, and cleans up for ever.
STUBBORN = """
import asyncio
from baton.runtime import lifecycle

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


# As the kernel does with a container's first process.
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
        _, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (128 + number if is_first else -number, "")
    finally:
        process.kill()
        process.communicate()


# What stops by itself when the signal comes, as a transfer service whose worker has just died.
STOPPING = """
import asyncio, os, signal
from baton.runtime import lifecycle

async def main():
    stop = lifecycle.stop_requested()
    stop.set()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.1)
    print("cleaned up", flush=True)
    return 0

lifecycle.run(main())
"""


def test_a_first_signal_lets_a_process_clean_up_that_stops_already():
    done = subprocess.run(
        [sys.executable, "-c", STOPPING], capture_output=True, text=True, timeout=20
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "cleaned up\n", "")


def test_a_process_knows_when_it_began_whatever_the_wall_clock_says():
    told = "from baton.runtime import lifecycle; print(lifecycle.begun_at())"
    before = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", told], stdout=subprocess.PIPE, text=True)
    after = time.monotonic()
    begun_at = float(process.communicate(timeout=60)[0])
    # The kernel counts in hundredths of a second.
    assert before - 0.02 <= begun_at <= after + 0.02
