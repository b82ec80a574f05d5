"""A small Ray cluster for tests, which ends when standard input ends.

It prints its address, reads one command per line and answers each command with a line of JSON:

- `actors`: returns the names of all live actors.
- `kill NAME`: kills the process of the actor NAME.
- `join NAME`: adds a node with one CPU and two units of the resource NAME.
- `lose NAME`: kills that node.
- `listen`: starts the server for Ray clients and returns its address.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

import ray
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray.util import list_named_actors

TIMEOUT_S = 120.0


def join(address: str, name: str) -> Node:
    """Adds a node as ray.cluster_utils.Cluster does; its processes end with this process."""
    params = RayParams(
        gcs_address=address,
        num_cpus=1,
        num_gpus=0,
        resources={name: 2},
        object_store_memory=80_000_000,
        include_log_monitor=False,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
    )
    node = Node(params, head=False, shutdown_at_exit=False, spawn_reaper=True)
    deadline = time.monotonic() + TIMEOUT_S
    while not any(one["Resources"].get(name) for one in ray.nodes() if one["Alive"]):
        assert time.monotonic() < deadline, f"no node {name}"
        time.sleep(0.05)
    return node


def lose(node: Node) -> None:
    for info in node.all_processes["raylet"]:
        info.process.kill()
        info.process.wait()


def listen() -> str:
    """Starts Ray's client server as `ray start --head` does; returns its HOST:PORT."""
    node = ray._private.worker._global_node
    with socket.socket() as probe:
        probe.bind((node.node_ip_address, 0))
        host, port = probe.getsockname()
    node._ray_params.ray_client_server_port = port
    node.start_ray_client_server()
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex((host, port)):
                return f"{host}:{port}"
        assert time.monotonic() < deadline, f"nothing listens at {host}:{port}"
        time.sleep(0.05)


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
    nodes: dict[str, Node] = {}
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
        answer = [listen()] if command == "listen" else sorted(found)
        print(json.dumps(answer), file=answers)
    # An orderly stop of Ray is slow. Ray's processes end when this process dies.
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
