"""Says in the log that no coordinator serves requests, and that one does again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from google.rpc import code_pb2

from baton.runtime.errors import RemoteError

_log = logging.getLogger(__name__)

# One that comes so soon after another is not told: where some requests are served, and others not.
_QUIET_S = 60.0


class OutageLog:
    """Of what requests and probes meet: one line when it begins, one when it is over.

    Args:
        clock: seconds; monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._quiet_until = clock()

    def failed(self, error: RemoteError) -> None:
        """The coordinator was asked for something, in vain."""
        if error.code == code_pb2.UNAVAILABLE:
            self.began(error)

    def began(self, why: object) -> None:
        """Whatever is asked of the coordinator would be in vain."""
        now = self._clock()
        if self._since is None and now >= self._quiet_until:
            self._since = now
            _log.warning("the coordinator does not serve: %s", why)

    def served(self) -> None:
        """The coordinator has answered, or is ready to."""
        if self._since is not None:
            now = self._clock()
            _log.info("the coordinator serves again, after %.3g s", now - self._since)
            self._since, self._quiet_until = None, now + _QUIET_S
