"""Output of a process whose reader is paused."""

import asyncio
import contextlib
import os
import re
import sys
from pathlib import Path

import pytest

WAIT_S = 120.0
# More lines than the pipe and the queue of waiting lines hold.
NUM_LINES = 20_000
SETUP = f"""
import asyncio, logging, os, sys
from baton.runtime.process import lifecycle, logs, output_streams

NUM_LINES = {NUM_LINES}
log = logging.getLogger("baton.test")
logs.setup("info", "coordinator")
"""
PAUSED = """
async def main():
    for number in range(NUM_LINES):
        log.info("line %d", number)
    print("goes on", flush=True)
    sys.stdin.read()
    log.error("the reason of the end")
    return 3

sys.exit(lifecycle.run(main()))
"""
PAUSED_CHILD = f"""
log.info("parent")
if child := os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
{PAUSED}
"""
# Waits for a reader only once: the second wait would take longer than the test.
FLUSHED_TWICE = """
log.info("line")
output_streams.FLUSH_TIMEOUT_S = 0.01
assert not output_streams.stderr.flush()
output_streams.FLUSH_TIMEOUT_S = output_streams.FLUSH_LIMIT_S = 600.0
sys.exit(lifecycle.run(asyncio.sleep(0, 3)))
"""
# Another function of atexit may write after the one that closes the streams.
WRITES_LATE = """
log.info("line")
output_streams.FLUSH_TIMEOUT_S = 0.01
output_streams._close()
log.info("late line")
sys.exit(3)
"""
FAILED_COMMAND = """
from baton.cli import main

sys.argv = ["baton", "coordinator", "--listen", "nowhere"]
main.main()
"""
FAILED_WORKER = """
from baton.runtime.config import parse
from baton.v1 import common_pb2
from baton.worker import main

config = parse({"model": "demo", "worker": {"metrics_listen": "nowhere"}}, "test")
sys.exit(main.main(config, common_pb2.ROLE_DECODE, "127.0.0.1:9"))
"""


async def start(program, *, full=False):
    """Starts a program after SETUP.

    Args:
        program: Python code.
        full: Whether the pipe of stderr is full at the start.

    Returns:
        The program's process, and the end from which its stderr can be read.
    """
    reads, writes = os.pipe()
    if full:
        os.set_blocking(writes, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writes, b"x")
        os.set_blocking(writes, True)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", f"{SETUP}{program}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=writes,
        )
    finally:
        os.close(writes)
    return process, reads


async def test_a_paused_reader_stops_no_event_loop_and_gets_the_last_lines():
    # The reader may get no CPU time for long.
    patient = "output_streams.FLUSH_TIMEOUT_S = output_streams.FLUSH_LIMIT_S = 600.0\n"
    process, reads = await start(f"{patient}{PAUSED}")
    try:
        async with asyncio.timeout(WAIT_S):
            assert await process.stdout.readline() == b"goes on\n"
            process.stdin.close()
            lines = (await asyncio.to_thread(Path(f"/dev/fd/{reads}").read_text)).splitlines()
            assert await process.wait() == 3
    finally:
        os.close(reads)
    assert lines.pop().endswith("the reason of the end")
    # Each line either came or was counted.
    number = num_dropped = 0
    for line in lines:
        if (note := re.search(r"(\d+) log lines dropped", line)) is not None:
            assert " warning coordinator baton.runtime.process.logs " in line
            num_dropped += int(note[1])
            number += int(note[1])
        else:
            assert line.endswith(f" line {number}")
            number += 1
    assert num_dropped > 0
    assert number == NUM_LINES


@pytest.mark.parametrize(
    ("program", "exit_code"),
    [
        (PAUSED, 3),
        (PAUSED_CHILD, 3),
        (FLUSHED_TWICE, 3),
        (WRITES_LATE, 3),
        (FAILED_COMMAND, 2),
        (FAILED_WORKER, 2),
    ],
    ids=["paused", "forked child", "flushed twice", "late", "failed command", "failed worker"],
)
async def test_a_process_ends_although_its_output_is_never_read(program, exit_code):
    process, reads = await start(program, full=True)
    try:
        process.stdin.close()
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == exit_code
    finally:
        if process.returncode is None:
            process.kill()
        os.close(reads)


async def test_a_forked_child_writes_its_own_lines():
    process, reads = await start("""
log.info("parent")
if os.fork() == 0:
    log.info("child")
    sys.exit()
os.wait()
log.info("parent again")
""")
    try:
        async with asyncio.timeout(WAIT_S):
            text = await asyncio.to_thread(Path(f"/dev/fd/{reads}").read_text)
            assert await process.wait() == 0
    finally:
        os.close(reads)
    # The parent's thread may write its line before or after the child's thread writes.
    assert sorted(line.rpartition("baton.test ")[2] for line in text.splitlines()) == [
        "child",
        "parent",
        "parent again",
    ]
