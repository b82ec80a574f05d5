"""Messages between the coordinator and its Ray driver: one JSON object per line."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, TypeAlias

# Maximum length of a message. A Start message contains a configuration with all tenants and
# adapters.
MAX_LINE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Open:
    """The first line to the driver.

    Attributes:
        address, namespace, runtime_env, connect_timeout_s, placement_timeout_s: settings from
            RayConfig.
        directory: directory for sockets and logs of a local Ray; empty for a cluster.
        coordinator: host:port that the workers attach to.
        command: command that runs a worker; empty: `baton` of the node's environment.
        stop_timeout_s: time that a worker may take to stop.
    """

    address: str
    namespace: str
    runtime_env: dict[str, Any]
    directory: str
    coordinator: str
    command: list[str]
    stop_timeout_s: float
    connect_timeout_s: float
    placement_timeout_s: float


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker; answered by Started.

    Attributes:
        gpus: number of GPUs; None: see placement.default_gpus.
        num_ranks: number of engine ranks that would use one GPU each.
        resources: custom resources.
        environment: variables added to the node's environment.
        config: effective configuration as YAML.
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
    """Open succeeded; the driver accepts Start messages."""

    address: str
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Open failed; the driver ends."""

    why: str


@dataclass(frozen=True, slots=True)
class Started:
    """The worker's actor was created, though perhaps not placed yet.

    Attributes:
        why: reason if the actor could not be created; else empty.
    """

    worker_id: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Waits:
    """Ray has no room for the worker yet."""

    worker_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Placed:
    """The worker was placed on a node of a host; its process starts there."""

    worker_id: str
    node: str
    host: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker ended without being told to; fields as in WorkerExit."""

    worker_id: str
    exit_code: int | None
    last_line: str = ""
    first_error: str = ""
    lost: str = "was lost"


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker that was told to end is gone with all its processes."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Silent:
    """Ray's head has not answered for `silent_s` seconds; 0: it answers again."""

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
        ValueError: The line is not a valid message.
    """
    try:
        values = json.loads(line)
        message: Message = _KINDS[values.pop("kind")](**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message: {line[:200]!r}: {error}") from None
    return message
