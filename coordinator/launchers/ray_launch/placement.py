"""Chooses nodes of a Ray cluster for workers, and explains why a worker cannot be placed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address


@dataclass(frozen=True, slots=True)
class Node:
    """A live node of Ray.

    Attributes:
        address: address of the node's host, as other nodes dial it.
        resources: total resources, used or free: "CPU", "GPU" and custom resources.
    """

    id: str
    address: str
    resources: Mapping[str, float]


def default_gpus(num_ranks: int, nodes: Sequence[Node], *, is_local: bool) -> float:
    """Number of GPUs that a worker reserves if the configuration names none.

    It is one GPU per rank. Only a local Ray, which gets no further nodes, is known to have no GPUs.
    A cluster without GPUs may get nodes with GPUs later. There, workers that reserve none would all
    use the first GPU of a node.

    Args:
        num_ranks: number of engine ranks that would use one GPU each.
        nodes: live nodes of Ray.
        is_local: whether Baton has started this Ray.
    """
    if is_local and not _have_gpus(nodes):
        return 0.0
    return float(num_ranks)


def cpu_build_hint(role: str, nodes: Sequence[Node]) -> str:
    """Returns advice for a Ray that is meant to have no GPUs; empty if a node has GPUs.

    Args:
        role: role of a worker that waits for GPUs, "prefill" or "decode".
        nodes: live nodes of Ray.
    """
    if not nodes or _have_gpus(nodes):
        return ""
    return f"; if workers run vLLM's CPU build, set ray.{role}.gpus to 0"


def shortage(needs: Mapping[str, float], nodes: Sequence[Node]) -> str:
    """Why no node can ever hold a worker; empty if some node could once its resources are free."""
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
    """Why a worker waits although some node could hold it.

    Args:
        needs: resources that the worker needs.
        free: free resources of all nodes together.
    """
    wanted = {name: amount for name, amount in needs.items() if amount > 0}
    together = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
    left = ", ".join(f"{name} {free.get(name, 0.0):g}" for name in wanted)
    if not wanted:
        return "its node is slow"
    return f"no node has all of {together} free (together they have {left}), or its node is slow"


def _have_gpus(nodes: Sequence[Node]) -> bool:
    return any(node.resources.get("GPU") for node in nodes)


def _missing(wanted: Mapping[str, float], node: Node) -> list[str]:
    return [name for name, amount in wanted.items() if node.resources.get(name, 0.0) < amount]


def partner_node(role: str, placed: Iterable[tuple[str, str]]) -> str | None:
    """The node with the largest surplus of workers of the other role.

    Prefill and decode workers on the same host can hand over through shared memory.

    Args:
        role: role of the worker to place.
        placed: pairs (role, node ID) of the other workers.

    Returns:
        A node ID; None if no node has a surplus of the other role.
    """
    lead: Counter[str] = Counter()
    for other, node in placed:
        lead[node] += -1 if other == role else 1
    best = max(lead.items(), key=lambda item: item[1], default=("", 0))
    return best[0] if best[1] > 0 else None


def unreachable(coordinator: str, nodes: Sequence[Node], own: Collection[str]) -> str:
    """Why workers on some node cannot dial the coordinator; empty if no problem is known.

    Args:
        coordinator: host:port that the workers would dial.
        nodes: nodes of Ray.
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
