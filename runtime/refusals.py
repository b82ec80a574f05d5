"""Who was not let in: counted by reason, and logged without what they showed."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from baton.runtime.tls import Handshakes

_log = logging.getLogger(__name__)

# Lines in a row, and after that per second: whoever guesses keys does not fill the log.
_LOG_BURST, _LOG_PER_S = 20.0, 1.0


class Refusals(Collector):
    """Of one process; a part of its metrics.

    Args:
        clock: in seconds.
        others: of a process beside this one that has no metrics of its own, in the same form.

    Attributes:
        counts: by service and reason.
        handshakes: of its gRPC port; None without TLS.
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
        """Counts one, and logs it unless many came before it.

        Args:
            service: "Inference", "Admin", "Cluster", "KvTransfer" or "metrics".
            reason: a word: "expired", "tenant".
            peer: address of whoever asked.
            who: the name of the key, where there is such a key.
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
        """By service and reason, as of now."""
        found = {**self.counts, **self._others()}
        if self.handshakes is not None:
            self.handshakes.expire()
            found["TLS", "handshake"] = self.handshakes.num_refused
        return found

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            "baton_access_refusals",
            "Calls and connections that were not let in.",
            labels=["service", "reason"],
        )
        for (service, reason), count in self.totals().items():
            family.add_metric([service, reason], count)
        yield family
