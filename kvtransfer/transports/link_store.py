"""The parts of a link that need no torch: the key store of its process group, and the GPU check.

The members of a process group find each other through a store of keys. Each end of a link keeps
the keys itself and sends the keys that it sets over the stream that joins the two ends. So joining
a group opens no port and reaches only the peer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from baton.kvtransfer.errors import TransferError

# Most keys that a peer may set, and their longest names; a group of two needs a few keys with names
# of some ten characters and values of some hundred bytes.
MAX_KEYS = 64
MAX_KEY_CHARS = 1024
MAX_VALUE_BYTES = 2**16
# Device files of NVIDIA's driver, on Linux and under WSL.
_GPU_DEVICES = (Path("/dev/nvidia0"), Path("/dev/dxg"))


def may_have_gpu() -> bool:
    """Whether a GPU driver is installed; only torch can say whether the GPU can be used."""
    return any(device.exists() for device in _GPU_DEVICES)


class LinkStore:
    """The keys that both ends have set. Every method may be called from any thread.

    Args:
        publish: Sends a key that this end sets to the peer.
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
        """Adds a key that the peer has set.

        Raises:
            TransferError: The key is larger, or the keys are more, than joining a group needs.
        """
        with self._changed:
            if len(key) > MAX_KEY_CHARS:
                raise TransferError(f"key of {len(key)} characters set; at most {MAX_KEY_CHARS}")
            if len(value) > MAX_VALUE_BYTES:
                raise TransferError(f"value of {len(value)} bytes set; at most {MAX_VALUE_BYTES}")
            if key not in self._values and len(self._values) >= MAX_KEYS:
                raise TransferError(f"more than {MAX_KEYS} keys set")
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a key and returns its value. Raises TransferError."""
        self.wait([key], timeout_s)
        return self._values[key]

    def wait(self, keys: Iterable[str], timeout_s: float) -> None:
        """Waits until all keys are set. Raises TransferError on a timeout or at the link's end."""
        missing, deadline = set(keys), time.monotonic() + timeout_s
        with self._changed:
            while missing := missing.difference(self._values):
                if self._over is not None:
                    raise TransferError(self._over)
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise TransferError(f"the peer did not join within {timeout_s:g} s")

    def check(self, keys: Iterable[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def close(self, detail: str) -> None:
        """Makes every waiting call raise TransferError with this message. Idempotent."""
        with self._changed:
            if self._over is None:
                self._over = detail
            self._changed.notify_all()
