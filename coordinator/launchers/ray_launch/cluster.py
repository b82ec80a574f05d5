"""Connects to a Ray cluster or starts a local one."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from typing import Any

import psutil
import ray
from ray.util import list_named_actors

from baton.coordinator.launchers.ray_launch import wire
from baton.coordinator.launchers.ray_launch.calls import error_line, live_nodes
from baton.coordinator.launchers.ray_launch.placement import unreachable
from baton.runtime.network.addresses import split_address

# Prefix of the names of Baton's actors.
NAME_PREFIX = "baton."

# Object store size of a local Ray: the minimum that Ray accepts, because Baton does not use it.
_OBJECT_STORE_BYTES = 80_000_000
_DIAL_TIMEOUT_S = 5.0
# Share of ray.connect_timeout_s in which the actors of the namespace must name their coordinator,
# and the least time in seconds. An actor that does not answer is killed, so a live one must have
# time to answer on a busy host. An actor that Ray has not placed never answers. The rest of the
# time is for the connection to Ray.
_ACTORS_SHARE, _LEAST_ACTORS_S = 0.5, 10.0


class Refused(Exception):
    """Ray cannot be used; the message explains why."""


def connect(opening: wire.Open) -> int:
    """Connects to Ray or starts a local Ray; returns its number of nodes. Raises Refused."""
    address = opening.address
    if address not in ("", "auto"):
        host, port = split_address(address.removeprefix("ray://"), "ray.address")
        try:
            socket.create_connection((host.strip("[]"), port), _DIAL_TIMEOUT_S).close()
        except OSError as error:
            raise Refused(f"ray.address: nothing answers at {address}: {error}") from None
    options: dict[str, Any] = {
        "namespace": opening.namespace,
        "runtime_env": opening.runtime_env or None,
        "logging_level": logging.WARNING,
    }
    if not address:
        options |= {
            "include_dashboard": False,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": opening.directory,
        }
    try:
        ray.init(address=address or "local", **options)
        nodes = live_nodes()
        if address:
            if why := unreachable(opening.coordinator, nodes, _own_addresses()):
                raise Refused(why)
            _reap(opening)
    except Refused:
        raise
    except Exception as error:
        # The cause may also be ray.runtime_env, Ray's token or another version of Ray.
        problem = f"cannot connect to Ray at {address!r}" if address else "cannot start Ray here"
        raise Refused(f"{problem}: {error_line(error)}") from None
    return len(nodes)


def _own_addresses() -> set[str]:
    return {one.address for found in psutil.net_if_addrs().values() for one in found}


def _reap(opening: wire.Open) -> None:
    """Ends actors of an earlier coordinator in the namespace.

    Raises:
        Refused: The other coordinator is still running.
    """
    actors = {}
    for name in list_named_actors():
        # An actor that has ended in the meantime is not found.
        with contextlib.suppress(ValueError):
            if name.startswith(NAME_PREFIX):
                actors[name] = ray.get_actor(name)
    answers = {name: actor.coordinator.remote() for name, actor in actors.items()}
    if answers:
        # All actors answer within one timeout, however many they are.
        timeout_s = max(_LEAST_ACTORS_S, _ACTORS_SHARE * opening.connect_timeout_s)
        ray.wait(list(answers.values()), num_returns=len(answers), timeout=timeout_s)
    coordinators = set()
    for answer in answers.values():
        with contextlib.suppress(Exception):
            coordinators.add(ray.get(answer, timeout=0))
    # This check comes before any actor is killed: an actor that does not answer may belong to a
    # running coordinator and wait for its placement.
    for other in sorted(coordinators - {opening.coordinator}):
        if _answers(other):
            raise Refused(
                f"ray.namespace: is {opening.namespace!r}, which the coordinator at {other} uses; "
                "give each coordinator its own"
            )
    for name, actor in actors.items():
        print(f"baton: ended {name}, left by an earlier coordinator", file=sys.stderr, flush=True)
        ray.kill(actor, no_restart=True)


def _answers(address: str) -> bool:
    host, port = split_address(address, "coordinator")
    with contextlib.suppress(OSError):
        socket.create_connection((host.strip("[]"), port), _DIAL_TIMEOUT_S).close()
        return True
    return False
