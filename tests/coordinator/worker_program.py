"""A worker process for the launcher's tests, with the arguments of `baton worker`.

The configuration's engine_args select its behaviour: "die" prints an error and exits ("noisily"
between the output of its child processes, "busily" after an info log line), "late" never attaches,
"stubborn" ignores SIGTERM, and "child" starts a child process that ignores SIGTERM too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from baton.runtime.process.locked_directory import LockedDirectory
from baton.v1 import cluster_pb2, common_pb2, kv_transfer_pb2
from tests.coordinator.scripted_worker import ScriptedWorker

_SLEEPER = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["worker"])
    for name in ("--role", "--worker-id", "--coordinator", "--config", "--directory"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    config = yaml.safe_load(sys.stdin)
    behaviour = config["engine_args"]
    if behaviour.get("die") == arguments.role:
        print("loading\nno such weights", file=sys.stderr)
        sys.exit(3)
    if behaviour.get("noisily") == arguments.role:
        print("(Worker pid=7) ERROR [model.py:9] RuntimeError: no weights in x", flush=True)
        print(f"baton worker {arguments.worker_id}: engine: see above", file=sys.stderr)
        print("resource_tracker: there appear to be leaked semaphores", file=sys.stderr)
        sys.exit(1)
    if behaviour.get("busily") == arguments.role:
        print("2026-01-01T12:00:00.123 info w baton.worker.main at work", file=sys.stderr)
        sys.exit(1)
    if behaviour.get("late") == arguments.role:
        signal.pause()
    if behaviour.get("child"):
        child = subprocess.Popen([sys.executable, "-c", _SLEEPER])
        print(f"child {child.pid}", file=sys.stderr, flush=True)
    directory = LockedDirectory(Path(arguments.directory))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if not behaviour.get("stubborn"):
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # From now on this process removes the directory when it is told to end.
    (directory.path / "something").touch()
    hello = cluster_pb2.Hello(
        worker_id=arguments.worker_id,
        incarnation=os.getpid(),
        pid=os.getpid(),
        role=common_pb2.Role.Value(f"ROLE_{arguments.role.upper()}"),
        state=cluster_pb2.WORKER_STATE_SERVING,
        model=common_pb2.ModelDescription(name="demo", max_model_len=1024, vocab_size=512),
        fingerprint=kv_transfer_pb2.KvFingerprint(num_layers=1, block_bytes=64),
        capacity=cluster_pb2.Capacity(max_send_bytes=2**20, max_receive_bytes=2**20),
        kv_address="127.0.0.1:9",
    )
    worker = ScriptedWorker(arguments.coordinator, hello)
    try:
        await serve(worker, stop)
    finally:
        # The parent process, which normally removes the directory, may have been killed at any
        # time, also before this process reached it.
        directory.remove()


async def serve(worker: ScriptedWorker, stop: asyncio.Event) -> None:
    try:
        await worker.connect()
        beating = asyncio.create_task(beat(worker))
        await stop.wait()
        beating.cancel()
        await worker.leave()
    finally:
        await worker.close()


async def beat(worker: ScriptedWorker) -> None:
    while True:
        await worker.load()
        await asyncio.sleep(0.1)


asyncio.run(main())
