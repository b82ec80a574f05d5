"""The section on Ray."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from baton.runtime.section import PositiveSeconds, Section


class RayPoolConfig(Section):
    """What one worker of a pool takes of its Ray node."""

    cpus: float = Field(1.0, ge=0, le=1e6, allow_inf_nan=False, description="Ray's CPU resource")
    gpus: float | None = Field(
        None,
        ge=0,
        le=1e6,
        allow_inf_nan=False,
        description="Ray's GPU resource; null: one per tensor-parallel rank of vLLM where a node "
        "of Ray has GPUs, otherwise none",
    )
    resources: dict[str, Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]] = Field(
        default_factory=dict, description="custom ones, by name"
    )

    @field_validator("resources")
    @classmethod
    def _are_custom(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, key in (("CPU", "cpus"), ("GPU", "gpus")):
            if name in resources:
                raise ValueError(f"must not name {name}; set {key} instead")
        return resources


class RayConfig(Section):
    """Where `launcher: ray` finds its cluster, and what workers take of it."""

    address: str = Field(
        "",
        description='ray://host:port, host:port, "auto" (the cluster that this host is part of); '
        "empty: a Ray of one's own on this host, which ends with the coordinator",
    )
    namespace: str = Field(
        "baton",
        min_length=1,
        description="of the workers' actors; one coordinator's alone: what an earlier one left "
        "there is ended",
    )
    runtime_env: dict[str, Any] = Field(
        default_factory=dict, description="Ray's own, of the workers' actors, passed through"
    )
    connect_timeout_s: PositiveSeconds = Field(60.0, description="longest wait for Ray")
    placement_timeout_s: PositiveSeconds = Field(
        300.0, description="a worker that finds no room for so long is given up"
    )
    prefill: RayPoolConfig = Field(default_factory=RayPoolConfig)
    decode: RayPoolConfig = Field(default_factory=RayPoolConfig)

    @field_validator("address")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value in ("", "auto"):
            return value
        host, _, port = value.removeprefix("ray://").rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ValueError('must be empty, "auto", host:port or ray://host:port')
        return value
