"""The `ray` section."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from baton.runtime.section import PositiveSeconds, Section


class RayPoolConfig(Section):
    """Resources that one worker of a pool reserves on its Ray node."""

    cpus: float = Field(1.0, ge=0, le=1e6, description="Amount of Ray's CPU resource.")
    gpus: float | None = Field(
        None,
        ge=0,
        le=1e6,
        description="Amount of Ray's GPU resource. null: one per rank of vLLM; none in a private "
        "Ray on a host without GPUs. 0: vLLM's CPU build in a Ray cluster.",
    )
    resources: dict[str, Annotated[float, Field(gt=0, le=1e12)]] = Field(
        default_factory=dict, description="Amounts of custom Ray resources, by name."
    )

    @field_validator("resources")
    @classmethod
    def _are_custom(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, key in (("CPU", "cpus"), ("GPU", "gpus")):
            if name in resources:
                raise ValueError(f"must not name {name}; set {key} instead")
        return resources


class RayConfig(Section):
    """Address of the Ray cluster for `launcher: ray`, and resources of its workers."""

    address: str = Field(
        "",
        description='ray://host:port, host:port, or "auto" for the cluster that this host belongs '
        "to. Empty: start a private Ray on this host, which ends with the coordinator.",
    )
    namespace: str = Field(
        "baton",
        min_length=1,
        description="Ray namespace of the workers' actors. Each coordinator needs its own: actors "
        "that an earlier coordinator left there are ended.",
    )
    runtime_env: dict[str, Any] = Field(
        default_factory=dict,
        description="Ray's runtime_env of the workers' actors, passed through unchanged.",
    )
    connect_timeout_s: PositiveSeconds = Field(
        60.0, description="Longest wait for the connection to Ray."
    )
    placement_timeout_s: PositiveSeconds | None = Field(
        None,
        description="A worker that Ray cannot place within this time is given up, and another one "
        "is started. null: scaling.start_timeout_s.",
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
