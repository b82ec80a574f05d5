"""A small Ray for tests, until its input ends: prints its address, then answers a line at a time.

"actors": the names of all live actors, as JSON. "kill NAME": kills the actor's process.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import ray
from ray.util import list_named_actors


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=80_000_000,
        log_to_driver=False,
        namespace="observer",
        _temp_dir=sys.argv[1],
    )
    print(ray.get_runtime_context().gcs_address, file=answers)
    for line in sys.stdin:
        command, _, name = line.strip().partition(" ")
        found = {one["name"]: one["namespace"] for one in list_named_actors(all_namespaces=True)}
        if command == "kill":
            actor = ray.get_actor(name, namespace=found[name])
            ray.kill(actor, no_restart=True)
        print(json.dumps(sorted(found)), file=answers)
    # Ray takes a while to stop in order, and the kernel ends what is left of it.
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
