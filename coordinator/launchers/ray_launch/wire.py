"""What a coordinator and the Ray driver beside it say to each other: one JSON object per line."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeAlias

# Of a message. A worker's configuration names every tenant and adapter.
MAX_LINE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Open:
    """The first line to the driver.

    Attributes:
        address, namespace, runtime_env, placement_timeout_s: of RayConfig.
        directory: of a Ray of one's own: its sockets and logs.
        coordinator: host:port that workers attach to.
        command: what runs a worker; empty: what runs `baton` on its node.
        stop_timeout_s: how long a worker may take to stop.
    """

    address: str
    namespace: str
    runtime_env: dict[str, Any]
    directory: str
    coordinator: str
    command: list[str]
    stop_timeout_s: float
    placement_timeout_s: float


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker: answered by Started.

    Attributes:
        gpus: None for one per rank, where a node has GPUs.
        num_ranks: of its engine that would use a GPU each.
        resources: custom ones.
        environment: of its process, over that of its node's.
        config: effective, as YAML.
    """

    worker_id: str
    role: str
    cpus: float
    gpus: float | None
    num_ranks: int
    resources: dict[str, float]
    environment: dict[str, str]
    config: str


@dataclass(frozen=True, slots=True)
class End:
    """Stop a worker; answered by Ended."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Open succeeded; the driver takes workers."""

    address: str
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Open failed; the driver ends."""

    why: str


@dataclass(frozen=True, slots=True)
class Started:
    """Its actor exists, though perhaps nowhere yet; with `why`, it does not."""

    worker_id: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Waits:
    """Ray has no room for the worker yet."""

    worker_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Placed:
    """The worker has a node, of a host; its process is started there."""

    worker_id: str
    node: str
    host: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker ended without being asked to; fields as in WorkerExit."""

    worker_id: str
    exit_code: int | None
    last_line: str = ""
    first_error: str = ""
    lost: str = "was lost"


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing is left of a worker that was to end."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Silent:
    """Ray's head has not answered for so long; 0: it answers again."""

    silent_s: float


Message: TypeAlias = (
    Open | Start | End | Ready | Refused | Started | Waits | Placed | Exited | Ended | Silent
)

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Open, Start, End, Ready, Refused, Started, Waits, Placed, Exited, Ended, Silent)
}


def encode(message: Message) -> bytes:
    """The message as one line."""
    values = {"kind": type(message).__name__, **dataclasses.asdict(message)}
    return json.dumps(values).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of one line.

    Raises:
        ValueError: it is none.
    """
    try:
        values = json.loads(line)
        message: Message = _KINDS[values.pop("kind")](**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message: {line[:200]!r}: {error}") from None
    return message
