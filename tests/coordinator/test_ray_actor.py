"""The last lines of a worker, when Ray kills the process of its actor next."""

import asyncio
import importlib.util
import os
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)

WAIT_S = 120.0
# The worker's output is read only when its process has ended and the call waits.
PROGRAM = """
import asyncio, os, sys

from baton.coordinator.launchers.ray_launch.actor import WorkerActor
from baton.runtime.process import output_streams

output_streams.FLUSH_TIMEOUT_S = output_streams.FLUSH_LIMIT_S = 600.0
command = ["/bin/sh", "-c", "echo last words >&2"]

async def main():
    actor = WorkerActor("w1", "decode", "127.0.0.1:9", "worker: {}", command, {})
    await actor.start("node")
    await asyncio.shield(actor._ended)
    call = asyncio.create_task(actor.exited() if sys.argv[1] == "exited" else actor.stop(60.0))
    # A call that does not wait for the output ends here.
    for _ in range(100):
        await asyncio.sleep(0)
    if not call.done():
        print("waits", flush=True)
        await call
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.parametrize("call", ["exited", "stop"])
async def test_the_last_lines_of_a_worker_are_written_before_the_actor_is_killed(call):
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    num_bytes = 0
    try:
        while True:
            num_bytes += os.write(writes, b"x")
    except BlockingIOError:
        os.set_blocking(writes, True)
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", PROGRAM, call), stdout=asyncio.subprocess.PIPE, stderr=writes
        )
    finally:
        os.close(writes)
    try:
        async with asyncio.timeout(WAIT_S):
            assert await process.stdout.readline() == b"waits\n"
            with os.fdopen(reads, "rb") as errors:
                text = await asyncio.to_thread(errors.read)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
    assert text[num_bytes:] == b"last words\n"
