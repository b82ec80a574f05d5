"""Output of a process whose reader is paused."""

import asyncio
import os
import re
import sys
from pathlib import Path

WAIT_S = 120.0
# More lines than the pipe and the queue of waiting lines hold.
NUM_LINES = 20_000
SETUP = """
import logging, os, sys
from baton.runtime import lifecycle, logs

log = logging.getLogger("baton.test")
logs.setup("info", "coordinator")
"""
PAUSED = f"""{SETUP}
async def main():
    for number in range({NUM_LINES}):
        log.info("line %d", number)
    print("goes on", flush=True)
    sys.stdin.read()
    log.error("the reason of the end")
    return 3

sys.exit(lifecycle.run(main()))
"""


async def start(program):
    """Starts a program; returns its process and the end from which its stderr can be read."""
    reads, writes = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=writes,
        )
    finally:
        os.close(writes)
    return process, reads


async def test_a_paused_reader_stops_no_event_loop_and_gets_the_last_lines():
    process, reads = await start(PAUSED)
    try:
        async with asyncio.timeout(WAIT_S):
            assert await process.stdout.readline() == b"goes on\n"
            process.stdin.close()
            lines = (await asyncio.to_thread(Path(f"/dev/fd/{reads}").read_text)).splitlines()
            assert await process.wait() == 3
    finally:
        os.close(reads)
    (note,) = (index for index, line in enumerate(lines) if "log lines dropped" in line)
    num_dropped = int(re.search(r"(\d+) log lines dropped", lines[note])[1])
    assert " warning coordinator baton.runtime.logs " in lines[note]
    assert lines.pop().endswith("the reason of the end")
    del lines[note]
    numbers = [int(line.rpartition(" ")[2]) for line in lines]
    kept = [*range(note), *range(note + num_dropped, NUM_LINES)]
    assert numbers == kept


async def test_a_process_ends_although_its_output_is_never_read():
    process, reads = await start(PAUSED)
    try:
        process.stdin.close()
        async with asyncio.timeout(WAIT_S):
            assert await process.wait() == 3
    finally:
        os.close(reads)


async def test_a_forked_child_writes_its_own_lines():
    process, reads = await start(f"""{SETUP}
log.info("parent")
if os.fork() == 0:
    log.info("child")
    os._exit(0)
os.wait()
log.info("parent again")
""")
    try:
        async with asyncio.timeout(WAIT_S):
            text = await asyncio.to_thread(Path(f"/dev/fd/{reads}").read_text)
            assert await process.wait() == 0
    finally:
        os.close(reads)
    # The parent's thread may write its line before or after the child writes.
    assert sorted(line.rpartition("baton.test ")[2] for line in text.splitlines()) == [
        "child",
        "parent",
        "parent again",
    ]
