"""Table cells that several commands share, and the choice of columns that fit a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from baton.runtime.enum_names import enum_name, role_name
from baton.runtime.ttft_target import TtftTarget
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
    """One cell for each of POOL_COLUMNS.

    WANTED is "-" for a pool that no autoscaler sizes, and is marked if an operator set the size.
    """
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
    """The worker's state, or "silent": the last reported state of a silent worker is outdated."""
    if worker.unresponsive:
        return "silent"
    return enum_name(cluster_pb2.WorkerState.DESCRIPTOR, worker.state)


def ttft_target(targets: admin_pb2.LaneTargets) -> str:
    """A lane's TTFT target, such as "500 ms + 1000 ms/1k"; "-" if it has none."""
    found = TtftTarget.from_ms(targets.ttft_ms, targets.ttft_ms_per_1k_tokens)
    return found.brief if found is not None else "-"


def share(used: int, total: int) -> str:
    """The share in percent; "-" if the total is 0."""
    return f"{100 * used / total:.0f} %" if total else "-"


def gigabytes(bytes_per_s: float) -> str:
    """A speed in gigabytes per second with three digits, such as "9.84 GB/s"."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def fitting(
    names: Sequence[str], widths: Sequence[int], drop_first: Sequence[str], room: int, gap: int
) -> list[int]:
    """Indices of the columns to show; columns are left out rather than cut off.

    Args:
        names: Names of all columns.
        widths: Width that each column needs, in characters.
        drop_first: Names of the columns to leave out first if the line is too short, in order.
        room: Characters of a line.
        gap: Characters between two columns.
    """
    left = list(range(len(names)))
    for name in drop_first:
        if sum(widths[index] for index in left) + gap * (len(left) - 1) <= room:
            break
        left = [index for index in left if names[index] != name]
    return left
