"""Counts refused calls and connections by reason, and logs them without their credentials."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from baton.runtime.security.tls import Handshakes

_log = logging.getLogger(__name__)

# Log lines in a burst, and per second after it, so that guessing keys does not fill the log.
_LOG_BURST, _LOG_PER_S = 20.0, 1.0


class Refusals(Collector):
    """Refused calls of one process, as a Prometheus collector.

    Args:
        clock: Returns monotonic seconds.
        others: Returns the counts of a helper process that has no metrics endpoint.

    Attributes:
        counts: Number of refusals by service and reason.
        handshakes: TLS handshakes of the gRPC port; None without TLS.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        others: Callable[[], Mapping[tuple[str, str], int]] = dict,
    ) -> None:
        self._clock, self._others = clock, others
        self.counts: Counter[tuple[str, str]] = Counter()
        self.handshakes: Handshakes | None = None
        self._budget, self._at, self._num_silent = _LOG_BURST, -math.inf, 0

    def count(self, service: str, reason: str, *, peer: str = "", who: str = "") -> None:
        """Counts a refusal and logs it, unless the log rate is exceeded.

        Args:
            service: "Inference", "Admin", "Cluster", "KvTransfer" or "metrics".
            reason: One word, such as "expired" or "tenant".
            peer: Address of the caller.
            who: Name of the caller's key; empty when unknown.
        """
        self.counts[service, reason] += 1
        now = self._clock()
        if now > self._at:
            self._budget = min(_LOG_BURST, self._budget + (now - self._at) * _LOG_PER_S)
            self._at = now
        if self._budget < 1:
            self._num_silent += 1
            return
        self._budget -= 1
        fields = {"service": service, "reason": reason, "peer": peer or "-", "key": who or "-"}
        if self._num_silent:
            fields["not_logged"] = str(self._num_silent)
            self._num_silent = 0
        _log.warning("refused", extra=fields)

    def totals(self) -> dict[tuple[str, str], int]:
        """Current counts by service and reason, including failed TLS handshakes."""
        found = {**self.counts, **self._others()}
        if self.handshakes is not None:
            self.handshakes.expire()
            found["TLS", "handshake"] = self.handshakes.num_refused
        return found

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "baton_access_refusals",
            "Calls and connections that were refused, by service and reason.",
            labels=["service", "reason"],
        )
        for (service, reason), count in self.totals().items():
            family.add_metric([service, reason], count)
        yield family
