"""What the coordinator's core is told of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.coordinator.state.scaling_config import ScalingSettings
from baton.runtime.config import (
    BatonConfig,
    LanesConfig,
    LaneTargetsConfig,
    LatencyConfig,
    TenantConfig,
)
from baton.runtime.latency import LatencyModel
from baton.runtime.names import FIRST_REVISION


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What the core needs of the configuration; times in seconds."""

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
    # Of the workers' streams.
    heartbeat_s: float = 0.5
    # Whether a decode worker may compute a prompt itself where that is sooner.
    local_prefill: bool = True
    # Of workers that nobody has measured.
    latency: LatencyModel = field(default_factory=lambda: LatencyModel.from_config(LatencyConfig()))
    lanes: LanesConfig = field(default_factory=LanesConfig)
    tenant_defaults: TenantConfig = field(default_factory=TenantConfig)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    max_ended_requests: int = 1024
    # What requests that name none hope for.
    targets: LaneTargetsConfig = field(default_factory=LaneTargetsConfig)
    scaling: ScalingSettings = field(default_factory=ScalingSettings)
    # That serves what no rollout tries out; what its workers run is the configuration.
    revision: str = FIRST_REVISION
    # Of requests that no caller traces and that were not remarkable; None: nothing is traced so.
    tail_share: float | None = None

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
            local_prefill=config.decode.local_prefill,
            latency=LatencyModel.from_config(config.latency),
            lanes=config.lanes,
            tenant_defaults=config.tenant_defaults,
            tenants=config.tenants,
            targets=config.scaling.targets,
            scaling=ScalingSettings.of(config),
            revision=config.worker.revision,
            tail_share=config.tracing.tail_share if config.tracing.otlp_endpoint else None,
        )
