"""The cells that several tables show, and which columns of a table there is room for."""

from __future__ import annotations

from collections.abc import Sequence

from baton.runtime.enum_names import enum_name, role_name
from baton.v1 import admin_pb2, cluster_pb2

# A name that begins with ">" is aligned right.
POOL_COLUMNS = (
    "POOL",
    ">SERVING",
    ">STARTING",
    ">DRAINING",
    ">WANTED",
    ">RUNNING",
    ">WAITING",
    ">KV USED",
)


def pool_cells(pool: admin_pb2.PoolInfo) -> tuple[str, ...]:
    """One for each of POOL_COLUMNS. "-": nothing sizes the pool; a size set by hand is marked."""
    wanted = f"{pool.desired} by hand" if pool.HasField("size_by_hand") else str(pool.desired)
    return (
        role_name(pool.role),
        str(pool.num_serving),
        str(pool.num_starting),
        str(pool.num_draining),
        wanted if pool.max_workers else "-",
        str(pool.num_running),
        str(pool.num_waiting),
        share(pool.kv_tokens_used, pool.kv_tokens_total),
    )


def state_name(worker: admin_pb2.WorkerInfo | admin_pb2.WorkerStatus) -> str:
    """As the worker has it, unless it is silent: what it last said of itself is no longer so."""
    if worker.unresponsive:
        return "silent"
    return enum_name(cluster_pb2.WorkerState.DESCRIPTOR, worker.state)


def share(used: int, total: int) -> str:
    """In percent; "-" of nothing."""
    return f"{100 * used / total:.0f} %" if total else "-"


def shown(
    names: Sequence[str], widths: Sequence[int], spare: Sequence[str], room: int, gap: int
) -> list[int]:
    """The columns to show, by their indices: a column that is left out is better than one cut.

    Args:
        names: of all columns.
        widths: that they need.
        spare: names of those that are left out where there is no room, in this order.
        room: characters of a line.
        gap: characters between two columns.
    """
    left = list(range(len(names)))
    for name in spare:
        if sum(widths[index] for index in left) + gap * (len(left) - 1) <= room:
            break
        left = [index for index in left if names[index] != name]
    return left
