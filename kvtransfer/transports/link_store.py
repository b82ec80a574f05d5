"""What of a link needs no torch: its rendezvous, and whether torch is worth importing for a GPU.

A process group finds its other member through a store of keys. Here each end keeps the keys itself
and tells the other of what it sets over the stream that joins the two, so that a rendezvous opens
no port and reaches nobody but the peer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from baton.kvtransfer.errors import TransferError

# Of what a peer may set; a group of two needs a few keys of some hundred bytes.
MAX_KEYS = 64
MAX_VALUE_BYTES = 2**16
# NVIDIA's driver, and the same under WSL.
_GPU_DEVICES = (Path("/dev/nvidia0"), Path("/dev/dxg"))


class LinkLost(TransferError):
    """A link is over, or never came to be. The message says why."""


def may_have_gpu() -> bool:
    """Whether a GPU's driver is here; only torch can say whether it can be used."""
    return any(device.exists() for device in _GPU_DEVICES)


class LinkStore:
    """The keys that both ends have set. Any thread may call anything.

    Args:
        publish: tells the peer of a key that this end sets.
    """

    def __init__(self, publish: Callable[[str, bytes], None]) -> None:
        self._publish = publish
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._over: str | None = None

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
        self._publish(key, value)

    def received(self, key: str, value: bytes) -> None:
        """The peer has set a key.

        Raises:
            LinkLost: more than any rendezvous needs.
        """
        with self._changed:
            if len(value) > MAX_VALUE_BYTES:
                raise LinkLost(f"key of {len(value)} bytes set; at most {MAX_VALUE_BYTES}")
            if key not in self._values and len(self._values) >= MAX_KEYS:
                raise LinkLost(f"more than {MAX_KEYS} keys set")
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a key; raises LinkLost."""
        self.wait([key], timeout_s)
        return self._values[key]

    def wait(self, keys: Iterable[str], timeout_s: float) -> None:
        """Waits until all keys are set; raises LinkLost when one is not in time, or never."""
        missing, deadline = set(keys), time.monotonic() + timeout_s
        with self._changed:
            while missing := missing.difference(self._values):
                if self._over is not None:
                    raise LinkLost(self._over)
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise LinkLost(f"the peer did not join within {timeout_s:g} s")

    def check(self, keys: Iterable[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def close(self, detail: str) -> None:
        """Nothing more comes: whoever waits learns why. Idempotent."""
        with self._changed:
            if self._over is None:
                self._over = detail
            self._changed.notify_all()
