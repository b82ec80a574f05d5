"""Ray driver, run as `python -m baton.coordinator.launchers.ray_launch.driver`.

The driver is a child process of the coordinator and exchanges the messages of wire.py over its
standard input and output. It is a separate process because Ray ends a driver whose cluster is gone,
blocks it while reconnecting and handles its signals, and the coordinator must keep running. When
the driver's input ends, it ends its workers, their actors and, if it has started one, its local
Ray. A second SIGTERM kills the workers. If the driver is killed, Ray ends its actors, and the
kernel ends a local Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray

from baton.coordinator.launchers.ray_launch import wire
from baton.coordinator.launchers.ray_launch.calls import CALL_TIMEOUT_S, in_thread
from baton.coordinator.launchers.ray_launch.cluster import Refused, connect
from baton.coordinator.launchers.ray_launch.workers import RayWorkers
from baton.runtime.process.locked_directory import LockedDirectory


def _channel() -> tuple[Any, Any]:
    """Duplicates stdin and stdout for messages, and redirects the originals away from Ray.

    Ray's processes read /dev/null, and their output goes to stderr.
    """
    commands, reports = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return commands, reports


async def _serve(
    opening: wire.Open, commands: Any, say: Callable[[wire.Message], None], ready: wire.Ready
) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(wire.MAX_LINE_BYTES)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), commands
    )
    workers = RayWorkers(opening, say)
    signals = itertools.count()

    def on_signal() -> None:
        # The first SIGTERM has the effect of the end of the commands: an orderly shutdown. As in
        # every process of Baton, the second one ends the drains.
        reader.feed_eof()
        if next(signals):
            workers.kill()

    loop.add_signal_handler(signal.SIGTERM, on_signal)
    say(ready)
    await workers.run(reader)
    transport.close()
    with contextlib.suppress(TimeoutError):
        await in_thread(lambda: ray.shutdown(wait_for_processes=True), CALL_TIMEOUT_S)


def main() -> None:
    commands, reports = _channel()
    # The coordinator handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def say(message: wire.Message) -> None:
        # The pipe is closed if the coordinator has ended.
        with contextlib.suppress(OSError):
            reports.write(wire.encode(message))

    opening = wire.decode(commands.readline())
    assert isinstance(opening, wire.Open)
    # The driver may outlive its coordinator, whose successor removes directories without a lock.
    directory = LockedDirectory(Path(opening.directory)) if opening.directory else None
    try:
        num_nodes = connect(opening)
    except Refused as error:
        say(wire.Refused(str(error)))
        os._exit(1)
    asyncio.run(_serve(opening, commands, say, wire.Ready(opening.address, num_nodes)))
    if directory is not None:
        directory.remove()
    sys.stderr.flush()
    # os._exit does not wait for threads of Ray, which may hang.
    os._exit(0)


if __name__ == "__main__":
    main()
