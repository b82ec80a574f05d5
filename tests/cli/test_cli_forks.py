"""A process with gRPC threads can start other processes."""

import os
import subprocess
import sys

# Starts another program while a gRPC server runs, as a launcher does.
STARTS_ANOTHER = """
import asyncio, baton.cli.main, grpc
from baton.runtime.process import lifecycle

async def main():
    server = grpc.aio.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    process = await asyncio.create_subprocess_exec("true")
    code = await process.wait()
    await server.stop(None)
    return code

raise SystemExit(lifecycle.run(main()))
"""


def test_starting_a_process_does_not_stop_grpcs_threads():
    """gRPC's fork handlers made children abort, and `baton up` hang, under load."""
    told = {"GRPC_VERBOSITY": "debug", "GRPC_TRACE": "fork,event_engine"}
    done = subprocess.run(
        [sys.executable, "-c", STARTS_ANOTHER],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "gRPC Tracers" in done.stderr
    assert "PrepareFork" not in done.stderr
    assert "fork() handlers" not in done.stderr
