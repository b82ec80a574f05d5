"""The part of the configuration that the coordinator's core reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.coordinator.state.scaling_config import ScalingSettings
from baton.runtime.config import (
    BatonConfig,
    LanesConfig,
    LaneTargetsConfig,
    LatencyConfig,
    StepsConfig,
    TenantConfig,
)
from baton.runtime.names import FIRST_REVISION
from baton.runtime.steps.latency import LatencyModel


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Configuration of the core; runtime/config describes the keys. Times are in seconds.

    Attributes:
        heartbeat_s: Interval of the heartbeats on the workers' streams.
        local_prefill: Whether a decode worker may compute a prompt itself when that is sooner.
        latency: Latency model of workers that have not been measured yet.
        max_ended_requests: Number of ended requests that are remembered, beside those whose client
            may resume them.
        targets: Latency targets of requests that name none.
        revision: Revision of the stable fleet, whose workers run the configured model.
        tail_share: Share of unremarkable requests that are traced; None: tracing is off.
        steps: Limits of the time of the workers' steps.
        elastic: Whether any worker may compute prompts and decode.
        fetch: Whether workers may fetch the beginning of a prompt from other workers.
    """

    model_name: str
    max_running_requests: int
    max_request_s: float
    max_recovery_s: float
    worker_timeout_s: float
    worker_silent_s: float
    worker_stuck_s: float
    max_lost_attempts: int
    handoff_timeout_s: float
    max_prefill_requests: int
    max_decode_requests: int
    heartbeat_s: float = 0.5
    local_prefill: bool = True
    latency: LatencyModel = field(default_factory=lambda: LatencyModel.from_config(LatencyConfig()))
    lanes: LanesConfig = field(default_factory=LanesConfig)
    tenant_defaults: TenantConfig = field(default_factory=TenantConfig)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    max_ended_requests: int = 1024
    targets: LaneTargetsConfig = field(default_factory=LaneTargetsConfig)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    revision: str = FIRST_REVISION
    tail_share: float | None = None
    steps: StepsConfig = field(default_factory=StepsConfig)
    elastic: bool = False
    fetch: bool = True

    @classmethod
    def of(cls, config: BatonConfig) -> CoreConfig:
        coordinator = config.coordinator
        return cls(
            model_name=config.model_name,
            max_running_requests=coordinator.max_running_requests,
            max_request_s=coordinator.max_request_s,
            max_recovery_s=coordinator.max_recovery_s,
            worker_timeout_s=coordinator.worker_timeout_s,
            worker_silent_s=coordinator.worker_silent_s,
            worker_stuck_s=coordinator.worker_stuck_s,
            max_lost_attempts=coordinator.max_lost_attempts,
            handoff_timeout_s=coordinator.handoff_timeout_s,
            max_prefill_requests=config.prefill.max_requests_per_worker,
            max_decode_requests=config.decode.max_requests_per_worker,
            heartbeat_s=coordinator.heartbeat_s,
            elastic=config.is_elastic,
            local_prefill=config.decode.local_prefill,
            latency=LatencyModel.from_config(config.latency),
            lanes=config.lanes,
            tenant_defaults=config.tenant_defaults,
            tenants=config.tenants,
            targets=config.scaling.targets,
            scaling=ScalingSettings.of(config),
            revision=config.worker.revision,
            tail_share=config.tracing.tail_share if config.tracing.otlp_endpoint else None,
            steps=config.steps,
            fetch=config.kv_store.fetch,
        )
