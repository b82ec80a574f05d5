"""The whole configuration, and the checks across its sections."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from baton.runtime.config.coordinator import CoordinatorConfig, LatencyConfig
from baton.runtime.config.http import HttpConfig
from baton.runtime.config.images import ImagesConfig
from baton.runtime.config.lanes import LanesConfig, TenantConfig
from baton.runtime.config.ray import RayConfig
from baton.runtime.config.scaling import ScalingSection
from baton.runtime.config.steps import StepsConfig
from baton.runtime.config.tracing import TracingConfig
from baton.runtime.config.workers import DecodePoolConfig, PoolConfig, SimulatedConfig, WorkerConfig
from baton.runtime.kv.kv_store_config import KvStoreConfig
from baton.runtime.kv.kv_transfer_config import KvTransferConfig
from baton.runtime.names import TENANT_NAMES, is_tenant
from baton.runtime.section import Section
from baton.runtime.security.security_config import SecurityConfig


class BatonConfig(Section):
    """The configuration; `baton config show` prints it with the defaults filled in."""

    model: str = Field(
        "glossary",
        min_length=1,
        description='Local directory, hub ID, "glossary" (the toy model that ships with Baton), '
        'or "demo" (random weights, generated on first use).',
    )
    served_model_name: str = Field(
        "", description="Model name in requests. Empty: the last part of model."
    )
    engine: Literal["vllm", "simulated"] = Field(
        "vllm",
        description="Engine of the workers. simulated: real processes and transfers, but no model.",
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="vLLM's engine arguments; null: vLLM's default. Baton sets some itself and "
        "refuses those that conflict.",
    )
    lora_adapters: dict[str, str] = Field(
        default_factory=dict,
        description="LoRA adapters: local directory or hub ID, by the name that requests give as "
        "their model. Every worker loads all of them.",
    )
    tool_call_parser: str = Field(
        "",
        description="Name of vLLM's tool call parser (hermes, llama3_json, ...), with which the "
        "gateway accepts tools. Empty: no tools.",
    )
    reasoning_parser: str = Field(
        "",
        description="Name of vLLM's reasoning parser (deepseek_r1, qwen3, ...), which separates "
        "reasoning from the answer. Empty: answers stay as the model writes them.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of Baton's own log lines on standard error."
    )
    coordinator: CoordinatorConfig = Field(default_factory=CoordinatorConfig)
    images: ImagesConfig = Field(default_factory=ImagesConfig)
    lanes: LanesConfig = Field(default_factory=LanesConfig)
    tenant_defaults: TenantConfig = Field(default_factory=TenantConfig)
    tenants: dict[str, TenantConfig] = Field(
        default_factory=dict,
        description="Tenants by name; a key that a tenant leaves out comes from tenant_defaults.",
    )
    prefill: PoolConfig = Field(default_factory=PoolConfig)
    decode: DecodePoolConfig = Field(default_factory=DecodePoolConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    kv_transfer: KvTransferConfig = Field(default_factory=KvTransferConfig)
    kv_store: KvStoreConfig = Field(default_factory=KvStoreConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    security: SecurityConfig = Field(default_factory=SecurityConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)
    elastic: bool | None = Field(
        None,
        description="Whether any worker may compute prompts and decode, so that the split into "
        "pools does not matter; false: strict roles. null: true if both pools have the same "
        "engine_args without enable_chunked_prefill: false, decode.local_prefill is true and "
        "steps.scheduler is baton.",
    )
    latency: LatencyConfig = Field(default_factory=LatencyConfig)
    simulated: SimulatedConfig = Field(default_factory=SimulatedConfig)
    scaling: ScalingSection = Field(default_factory=ScalingSection)
    steps: StepsConfig = Field(default_factory=StepsConfig)
    launcher: Literal["local", "ray"] = Field(
        "local", description="How baton up starts workers: on this host (local) or through Ray."
    )
    ray: RayConfig = Field(default_factory=RayConfig)

    @field_validator("tenants")
    @classmethod
    def _have_defaults(
        cls, tenants: dict[str, TenantConfig], info: ValidationInfo
    ) -> dict[str, TenantConfig]:
        defaults = info.data.get("tenant_defaults", TenantConfig())
        return {
            name: defaults.model_copy(update=one.model_dump(exclude_unset=True))
            for name, one in tenants.items()
        }

    @model_validator(mode="after")
    def _tenants_make_sense(self) -> BatonConfig:
        for name in self.tenants:
            if not is_tenant(name):
                raise ValueError(f"tenants: a name is {name!r}; must be {TENANT_NAMES}")
        named = {f"tenants.{name}": tenant for name, tenant in self.tenants.items()}
        for key, tenant in {"tenant_defaults": self.tenant_defaults, **named}.items():
            if tenant.burst_tokens is not None and tenant.tokens_per_s is None:
                raise ValueError(
                    f"{key}.burst_tokens: is {tenant.burst_tokens}; needs tokens_per_s, "
                    "the rate at which it fills again"
                )
        return self

    @model_validator(mode="after")
    def _adapters_make_sense(self) -> BatonConfig:
        for name, path in self.lora_adapters.items():
            if not name or name == self.model_name:
                taken = f"must not be empty, nor {self.model_name!r}, which is the base model's"
                raise ValueError(f"lora_adapters: a name is {name!r}; {taken}")
            if not path:
                raise ValueError(f"lora_adapters.{name}: is empty; must be a directory or hub id")
        return self

    def engine_args_of(self, pool: PoolConfig) -> dict[str, Any]:
        """Engine arguments of a pool: the common ones, overridden by its own, without nulls."""
        given = self.engine_args | pool.engine_args
        return {name: value for name, value in given.items() if value is not None}

    def tensor_parallel_size(self, pool: PoolConfig) -> Any:
        """Configured ranks per stage of a pool's engines; vLLM checks that it is a number."""
        return self.engine_args_of(pool).get("tensor_parallel_size", 1)

    def pipeline_parallel_size(self, pool: PoolConfig) -> Any:
        """Configured pipeline stages of a pool's engines; vLLM checks that it is a number."""
        return self.engine_args_of(pool).get("pipeline_parallel_size", 1)

    def num_ranks(self, pool: PoolConfig) -> int:
        """Ranks per engine of a pool; 0 if a configured value is invalid (vLLM reports that)."""
        sizes = self.tensor_parallel_size(pool), self.pipeline_parallel_size(pool)
        return math.prod(size if isinstance(size, int) and size > 0 else 0 for size in sizes)

    @property
    def is_elastic(self) -> bool:
        """Whether any worker may compute prompts and decode."""
        if self.elastic is not None:
            return self.elastic
        prefill, decode = (self.engine_args_of(one) for one in (self.prefill, self.decode))
        # Without chunked prefill, a step holds a whole prompt, and no ITL target can bound it.
        bounds_steps = (
            self.steps.scheduler == "baton" and decode.get("enable_chunked_prefill") is not False
        )
        return prefill == decode and self.decode.local_prefill and bounds_steps

    @property
    def model_name(self) -> str:
        """Name of the base model in requests."""
        if self.served_model_name:
            return self.served_model_name
        path = Path(self.model)
        # The path "." has an empty name, so it is resolved too.
        return path.name if path.name not in ("", "..") else path.resolve().name or "model"
