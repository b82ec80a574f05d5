"""Where in a Ray cluster a worker can be, and where it should be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address


@dataclass(frozen=True, slots=True)
class Node:
    """A live node of Ray.

    Attributes:
        address: its host's, as other nodes dial it.
        resources: all it has, in use or not: "CPU", "GPU" and custom ones.
    """

    id: str
    address: str
    resources: Mapping[str, float]


def shortage(needs: Mapping[str, float], nodes: Sequence[Node]) -> str:
    """What no node has enough of to ever hold a worker; empty when one could, once it is free."""
    wanted = {name: amount for name, amount in needs.items() if amount > 0}
    if any(_missing(wanted, node) == [] for node in nodes):
        return ""
    if not nodes:
        return "Ray has no nodes"
    for name, amount in wanted.items():
        most = max(node.resources.get(name, 0.0) for node in nodes)
        if most < amount:
            return f"no node of Ray has {name} {amount:g} (most: {most:g})"
    together = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
    return f"no node of Ray has all of {together}"


def in_use(needs: Mapping[str, float], free: Mapping[str, float]) -> str:
    """Why a worker waits that some node could hold.

    Args:
        needs: of the worker.
        free: of all nodes together.
    """
    wanted = {name: amount for name, amount in needs.items() if amount > 0}
    together = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
    left = ", ".join(f"{name} {free.get(name, 0.0):g}" for name in wanted)
    if not wanted:
        return "its node is slow"
    return f"no node has all of {together} free (together they have {left}), or its node is slow"


def _missing(wanted: Mapping[str, float], node: Node) -> list[str]:
    return [name for name, amount in wanted.items() if node.resources.get(name, 0.0) < amount]


def partner_node(role: str, placed: Iterable[tuple[str, str]]) -> str | None:
    """The node whose workers most lack one of this role: pairs on one host share its memory.

    Args:
        role: of the worker to place.
        placed: (role, node id) of the others.

    Returns:
        A node id; None when no node has more workers of the other role.
    """
    lead: Counter[str] = Counter()
    for other, node in placed:
        lead[node] += -1 if other == role else 1
    best = max(lead.items(), key=lambda item: item[1], default=("", 0))
    return best[0] if best[1] > 0 else None


def unreachable(coordinator: str, nodes: Sequence[Node], own: Collection[str]) -> str:
    """Why some node's workers could not dial the coordinator; empty when nothing is known of it.

    Args:
        coordinator: host:port that they would dial.
        nodes: of Ray.
        own: addresses of the coordinator's host.
    """
    host, _, _ = coordinator.rpartition(":")
    others = [node.address for node in nodes if node.address not in own]
    if not others or not _is_loopback(host.strip("[]")):
        return ""
    return (
        f"coordinator.listen: workers would dial {coordinator}, which those on Ray's other nodes "
        f"({others[0]} is one of {len(others)}) cannot reach; listen on an address of this host, "
        "or on 0.0.0.0"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
