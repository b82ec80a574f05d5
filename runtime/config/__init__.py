"""The configuration object, one per process.

It is read once at the start, from a YAML file and command-line overrides; no other code reads the
environment. An unknown key is an error that names the nearest known key.
"""

from __future__ import annotations

from baton.runtime.config.baton_config import BatonConfig
from baton.runtime.config.coordinator import CoordinatorConfig, LatencyConfig
from baton.runtime.config.files import dump, load, parse, shown
from baton.runtime.config.http import BatchesConfig, CellConfig, HttpConfig, PoolingConfig
from baton.runtime.config.images import ImagesConfig
from baton.runtime.config.lanes import (
    BatchLaneConfig,
    InteractiveLaneConfig,
    LaneConfig,
    LanesConfig,
    TenantConfig,
)
from baton.runtime.config.ray import RayConfig, RayPoolConfig
from baton.runtime.config.scaling import (
    LaneTargetsConfig,
    NoTargetsConfig,
    PoolLimitsConfig,
    ScalingSection,
    TargetsConfig,
)
from baton.runtime.config.steps import StepsConfig
from baton.runtime.config.tracing import TracingConfig
from baton.runtime.config.workers import (
    DecodePoolConfig,
    PoolConfig,
    SimulatedAnswer,
    SimulatedConfig,
    WorkerConfig,
)
from baton.runtime.kv.kv_transfer_config import KvTransferConfig

__all__ = [
    "BatchLaneConfig",
    "BatchesConfig",
    "BatonConfig",
    "CoordinatorConfig",
    "DecodePoolConfig",
    "HttpConfig",
    "CellConfig",
    "ImagesConfig",
    "InteractiveLaneConfig",
    "KvTransferConfig",
    "LaneConfig",
    "LaneTargetsConfig",
    "LanesConfig",
    "LatencyConfig",
    "NoTargetsConfig",
    "PoolConfig",
    "PoolingConfig",
    "PoolLimitsConfig",
    "RayConfig",
    "RayPoolConfig",
    "ScalingSection",
    "SimulatedAnswer",
    "SimulatedConfig",
    "StepsConfig",
    "TargetsConfig",
    "TenantConfig",
    "TracingConfig",
    "WorkerConfig",
    "dump",
    "load",
    "parse",
    "shown",
]
