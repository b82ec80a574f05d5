"""Logs when a cell's coordinator stops serving requests, and when it serves again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from google.rpc import code_pb2

from baton.runtime.errors import RemoteError

_log = logging.getLogger(__name__)

# An outage that begins within this many seconds after the last one is not logged, so that a cell
# that serves some requests and refuses others does not fill the log.
_QUIET_S = 60.0


class OutageLog:
    """Writes one log line when an outage begins and one when it ends.

    Requests and health probes of one cell report what they observe.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._quiet_until = clock()

    def failed(self, error: RemoteError) -> None:
        """Reports a failed call; only UNAVAILABLE begins an outage."""
        if error.code == code_pb2.UNAVAILABLE:
            self.began(error)

    def began(self, why: object) -> None:
        """Begins an outage, for the given reason."""
        now = self._clock()
        if self._since is None and now >= self._quiet_until:
            self._since = now
            _log.warning("coordinator outage begins: %s", why)

    def served(self) -> None:
        """Reports that the coordinator answered or is ready; ends the outage."""
        if self._since is not None:
            now = self._clock()
            _log.info("coordinator outage ends after %.3g s: it serves again", now - self._since)
            self._since, self._quiet_until = None, now + _QUIET_S
