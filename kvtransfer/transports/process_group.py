"""The torch.distributed process group of a link: two members, gloo for CPUs or NCCL for GPUs.

A group is not thread-safe; collective.py decides which thread uses it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed

from baton.kvtransfer.errors import TransferError
from baton.kvtransfer.transports.link_store import LinkStore

Backend = Literal["gloo", "nccl"]
# Ranks in a link's group.
SENDER, RECEIVER = 0, 1
# gloo's size_t, in native byte order.
_SIZE = struct.Struct("@N")
# Interval in seconds at which NCCL operations are polled: NCCL has no wait with a deadline.
_POLL_S = 50e-6


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """The settings of one end of a link.

    Attributes:
        backend: gloo for CPUs, nccl for GPUs.
        host: This machine's address on the route to the peer; gloo listens there, on a free port.
        open_timeout_s: Longest time to join the group.
        frame_timeout_s: Longest time for one operation, including the wait for the peer.
    """

    backend: Backend
    host: str
    open_timeout_s: float = 5.0
    frame_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        # With an empty host gloo would take this machine's name, or localhost.
        if not self.host:
            raise ValueError("host is empty; must be this machine's address towards the peer")


def unusable_reason(backend: Backend) -> str | None:
    """Returns why this process cannot use a backend; None when it can."""
    if backend == "gloo":
        return None if distributed.is_gloo_available() else "torch was built without gloo"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return None if distributed.is_nccl_available() else "torch was built without NCCL"


class _Store(distributed.Store):
    """Makes a LinkStore usable as torch's store."""

    def __init__(self, store: LinkStore, timeout_s: float) -> None:
        super().__init__()
        self._store, self._timeout_s = store, timeout_s

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._checked(self._store.get(key, self._timeout_s))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def _checked(self, value: bytes) -> bytes:
        return value


class _GlooStore(_Store):
    """Checks the values that gloo reads, because gloo trusts the lengths in them."""

    def _checked(self, value: bytes) -> bytes:
        """Raises TransferError unless the value is gloo's Rank: host, address, two identifiers."""
        rest = memoryview(value)
        for _ in ("host name", "address"):
            length = _SIZE.unpack_from(rest)[0] if len(rest) >= _SIZE.size else len(rest)
            rest = rest[_SIZE.size + length :]
        if len(rest) != 2 * _SIZE.size:
            raise TransferError(f"{len(value)} bytes that are not an address were set")
        return value


class Group(ABC):
    """A process group of two. The constructor joins it; the last reference leaves it."""

    @abstractmethod
    def buffer(self, num_bytes: int) -> memoryview:
        """Returns memory to receive into."""

    @abstractmethod
    def send(self, payload: memoryview) -> Any:
        """Begins to send; the group reads the payload until `wait` returns or raises."""

    @abstractmethod
    def recv(self, target: memoryview) -> Any:
        """Begins to receive exactly as many bytes as the target has."""

    @abstractmethod
    def wait(self, work: Any, timeout_s: float) -> None:
        """Waits for an operation. After a RuntimeError or TimeoutError the group is unusable."""

    @abstractmethod
    def cut(self) -> None:
        """Makes every `wait` raise soon. Called from another thread; does not block."""


class _GlooGroup(Group):
    """Sends over TCP, directly between the memory of the two ends."""

    def __init__(self, store: LinkStore, rank: int, options: LinkOptions) -> None:
        group = distributed.ProcessGroupGloo
        made = group._Options()
        made._devices = [group.create_device(hostname=options.host)]
        made._timeout = timedelta(seconds=options.open_timeout_s)
        # These threads run collectives; the sends and receives of links run in the device's thread.
        made._threads = 1
        kept = _GlooStore(store, options.open_timeout_s)
        self._group, self._peer = group(kept, rank, 2, made), 1 - rank

    def buffer(self, num_bytes: int) -> memoryview:
        # Pages that no operation has used yet take no memory.
        return memoryview(mmap.mmap(-1, num_bytes))

    def send(self, payload: memoryview) -> Any:
        return self._group.send([torch.frombuffer(payload, dtype=torch.uint8)], self._peer, 0)

    def recv(self, target: memoryview) -> Any:
        return self._group.recv([torch.frombuffer(target, dtype=torch.uint8)], self._peer, 0)

    def wait(self, work: Any, timeout_s: float) -> None:
        work.wait(timedelta(seconds=timeout_s))

    def cut(self) -> None:
        # gloo has no abort; a wait that times out closes the connection for all other waits.
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.zeros(1)], self._peer, 1).wait(timedelta(milliseconds=1))


class _NcclGroup(Group):
    """Sends between two GPUs; payloads pass through the memory of both."""

    def __init__(self, store: LinkStore, rank: int, options: LinkOptions) -> None:
        # Without this setting torch ends the process when an operation takes too long.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        made = distributed.ProcessGroupNCCL.Options()
        made._timeout = timedelta(seconds=options.open_timeout_s)
        kept = _Store(store, options.open_timeout_s)
        self._group, self._peer = distributed.ProcessGroupNCCL(kept, rank, 2, made), 1 - rank
        self._is_cut = threading.Event()
        self._device = torch.device("cuda", torch.cuda.current_device())
        # NCCL connects in the first operation; this one connects before the first payload.
        hello = memoryview(bytearray(1))
        work = self.send(hello) if rank == SENDER else self.recv(hello)
        self.wait(work, options.open_timeout_s)

    def buffer(self, num_bytes: int) -> memoryview:
        return memoryview(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy())

    def send(self, payload: memoryview) -> Any:
        on_device = torch.frombuffer(payload, dtype=torch.uint8).to(self._device)
        return self._group.send([on_device], self._peer, 0), on_device, None

    def recv(self, target: memoryview) -> Any:
        on_device = torch.empty(len(target), dtype=torch.uint8, device=self._device)
        on_host = torch.frombuffer(target, dtype=torch.uint8)
        return self._group.recv([on_device], self._peer, 0), on_device, on_host

    def wait(self, work: Any, timeout_s: float) -> None:
        operation, on_device, on_host = work
        deadline = time.monotonic() + timeout_s
        while not operation.is_completed():
            if self._is_cut.is_set() or time.monotonic() > deadline:
                # Ends the kernels. It may wait for the GPU, so only the group's thread does it.
                self._group.abort()
                raise TimeoutError(f"not done within {timeout_s:g} s")
            time.sleep(_POLL_S)
        # The operation is done or failed: this call does not wait, but raises on failure.
        operation.wait()
        if on_host is not None:
            on_host.copy_(on_device)

    def cut(self) -> None:
        self._is_cut.set()


_GROUPS: dict[Backend, Callable[[LinkStore, int, LinkOptions], Group]] = {
    "gloo": _GlooGroup,
    "nccl": _NcclGroup,
}


def join(store: LinkStore, rank: int, options: LinkOptions) -> Group:
    """Joins the group whose members share a store. Raises TransferError and torch's errors."""
    return _GROUPS[options.backend](store, rank, options)
