"""A coordinator that counts and checks its state on demand, for benchmarks.

`python -m baton.bench.checked_coordinator baton.yaml`. It prints "ready". For each COUNT or CHECK
on standard input it prints a JSON line: the number of requests and of sessions, and, for CHECK, the
problem found if not every resource has one owner (empty: none).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from baton.coordinator.server.server import Coordinator
from baton.runtime.config import load
from baton.runtime.process import lifecycle, logs

COUNT, CHECK = b"n", b"c"
_STDIN = 0


def report(coordinator: Coordinator, *, checks: bool) -> str:
    core, problem = coordinator.shell.core, ""
    if checks:
        # With thousands of requests this takes so long that streams pause.
        try:
            core.check_integrity()
        except AssertionError as error:
            problem = f"check_integrity: {error!r}"
    counts = {"requests": core.num_requests, "sessions": coordinator.shell.num_sessions}
    return json.dumps({**counts, "problem": problem})


async def serve(path: str) -> int:
    """Serves until SIGTERM, then drains like `baton coordinator`."""
    config = load(path)
    logs.setup(config.log_level, "coordinator")
    stop, loop = lifecycle.stop_requested(), asyncio.get_running_loop()
    async with lifecycle.frozen_heap(), Coordinator(config) as coordinator:

        def on_input() -> None:
            if command := os.read(_STDIN, 1):
                print(report(coordinator, checks=command == CHECK), flush=True)
            else:
                loop.remove_reader(_STDIN)

        loop.add_reader(_STDIN, on_input)
        print("ready", flush=True)
        await stop.wait()
        loop.remove_reader(_STDIN)
        await coordinator.drain(config.coordinator.drain_timeout_s)
    return 0


if __name__ == "__main__":
    sys.exit(lifecycle.run(serve(sys.argv[1])))
