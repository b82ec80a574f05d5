"""A small Ray for tests, until its input ends: prints its address, then answers a line at a time.

"actors": the names of all live actors, as JSON. "kill NAME": kills the actor's process.
"join NAME": one more node, with a CPU and two of the resource NAME. "lose NAME": kills that node.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import ray
from ray.util import list_named_actors

TIMEOUT_S = 30.0


def join(address: str, name: str) -> subprocess.Popen[bytes]:
    # Tied to this process's life.
    tether = [sys.executable, "-m", "baton.coordinator.tether", str(os.getpid())]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
    resources = f"--resources={json.dumps({name: 2})}"
    options = [f"--address={address}", resources, "--object-store-memory=80000000"]
    node = subprocess.Popen([*tether, *start, *options], stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + TIMEOUT_S
    while not any(one["Resources"].get(name) for one in ray.nodes() if one["Alive"]):
        assert time.monotonic() < deadline, f"no node {name}"
        time.sleep(0.05)
    return node


def lose(node: subprocess.Popen[bytes]) -> None:
    for process in psutil.Process(node.pid).children(recursive=True):
        if process.name() == "raylet":
            process.kill()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ray.init(
        address="local",
        num_cpus=4,
        resources={"near": 4},
        include_dashboard=False,
        object_store_memory=80_000_000,
        log_to_driver=False,
        namespace="observer",
        _temp_dir=sys.argv[1],
    )
    address = ray.get_runtime_context().gcs_address
    nodes: dict[str, subprocess.Popen[bytes]] = {}
    print(address, file=answers)
    for line in sys.stdin:
        command, _, name = line.strip().partition(" ")
        found = {one["name"]: one["namespace"] for one in list_named_actors(all_namespaces=True)}
        if command == "kill":
            actor = ray.get_actor(name, namespace=found[name])
            ray.kill(actor, no_restart=True)
        elif command == "join":
            nodes[name] = join(address, name)
        elif command == "lose":
            lose(nodes.pop(name))
        print(json.dumps(sorted(found)), file=answers)
    # Ray takes a while to stop in order, and the kernel ends what is left of it.
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
