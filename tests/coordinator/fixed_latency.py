"""A worker kind whose step costs do not change."""

from __future__ import annotations

from dataclasses import dataclass

from baton.runtime.steps.latency import LatencyModel


@dataclass(frozen=True)
class FixedLatency:
    """Predictions of a worker; see `worker_traits.Latency`."""

    model: LatencyModel
    is_measured: bool = True

    @property
    def of_kind(self) -> FixedLatency:
        return self

    def prefill_s(self, num_tokens: int) -> float:
        return self.model.prefill_s(num_tokens)

    def decode_step_s(self, num_requests: float, num_kv_tokens: float) -> float:
        return self.model.decode_step_s(num_requests, num_kv_tokens)
