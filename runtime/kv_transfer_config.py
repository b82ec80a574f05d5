"""The `kv_transfer` section; the transfer service reads it, `security`, and no others."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from baton.runtime.section import PositiveInt, PositiveSeconds, Section


class KvTransferConfig(Section):
    """The transfer service beside each engine."""

    listen: str = Field(
        "",
        description="host:port; port 0 picks a free one; empty: the interface that leads to the "
        "coordinator, loopback when that is where it listens",
    )
    advertise_host: str = Field("", description="host other workers dial; empty: that of listen")
    transports: list[Literal["shm", "nccl", "gloo", "grpc"]] = Field(
        ["shm", "nccl", "grpc"],
        min_length=1,
        description="how bytes may move, best first; each pair takes the first that both can",
    )
    grpc_connections: PositiveInt = Field(
        2, le=16, description="to each other worker; handoffs are spread over them"
    )
    port_range: str = Field(
        "", description="first-last: where a port 0 of listen is picked; empty: anywhere"
    )
    send_bytes: PositiveInt = Field(256 * 2**20, description="the sender's staging")
    receive_bytes: PositiveInt = Field(256 * 2**20, description="the receiver's staging")
    open_timeout_s: PositiveSeconds = Field(5.0, description="wait for a reservation")
    idle_timeout_s: PositiveSeconds = Field(
        60.0, description="an open handoff that gets no frame for so long expires"
    )
    commit_ttl_s: PositiveSeconds = Field(
        30.0, description="a committed handoff that nobody loads for so long expires"
    )
    claim_timeout_s: PositiveSeconds = Field(10.0, description="longest load")
    progress_bytes: PositiveInt = Field(
        4 * 2**20,
        description="what arrives is loaded by so many bytes at a time, the end by halves",
    )
    cpus: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list,
        description="cores the service runs on; empty: any (baton up on CPUs: none that prefills)",
    )

    @field_validator("port_range")
    @classmethod
    def _is_port_range(cls, value: str) -> str:
        first, separator, last = value.partition("-")
        if value and not (
            separator
            and first.isdecimal()
            and last.isdecimal()
            and 1 <= int(first) <= int(last) <= 65535
        ):
            raise ValueError("must be first-last, two ports of 1 to 65535, the lower one first")
        return value

    @field_validator("transports")
    @classmethod
    def _are_different(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("must name each transport once")
        return value
