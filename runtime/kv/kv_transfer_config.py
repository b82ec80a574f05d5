"""The `kv_transfer` section; the transfer service reads only this section and `security`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from baton.runtime.kv.kv_transports import DEFAULT_TRANSPORTS, TRANSPORTS
from baton.runtime.section import PositiveInt, PositiveSeconds, Section


def _known_transport(name: str) -> str:
    if name not in TRANSPORTS:
        raise ValueError(f"must be one of {', '.join(TRANSPORTS)}")
    return name


class KvTransferConfig(Section):
    """Settings of the transfer service, which runs beside each engine."""

    listen: str = Field(
        "",
        description="host:port of the service; port 0 picks a free one. Empty: the interface on "
        "the route to the coordinator, or loopback when the coordinator listens there.",
    )
    advertise_host: str = Field(
        "", description="Host name that other workers dial. Empty: the host of listen."
    )
    transports: list[Annotated[str, AfterValidator(_known_transport)]] = Field(
        list(DEFAULT_TRANSPORTS),
        min_length=1,
        description=f"Transports that may move KV blocks ({', '.join(TRANSPORTS)}), in order of "
        "preference; each pair of workers uses the first that both support.",
    )
    grpc_connections: Annotated[int, Field(ge=1, le=16)] = Field(
        2,
        description="gRPC connections to each other worker; handoffs are spread over them.",
    )
    port_range: str = Field(
        "",
        description="Port range first-last from which port 0 of listen is picked. Empty: any port.",
    )
    send_bytes: PositiveInt = Field(
        256 * 2**20, description="Size of the sender's staging memory, in bytes."
    )
    receive_bytes: PositiveInt = Field(
        256 * 2**20, description="Size of the receiver's staging memory, in bytes."
    )
    open_timeout_s: PositiveSeconds = Field(
        5.0, description="Longest wait for the receiver to reserve memory for a handoff."
    )
    idle_timeout_s: PositiveSeconds = Field(
        60.0, description="An open handoff without a new frame for this long expires."
    )
    commit_ttl_s: PositiveSeconds = Field(
        30.0, description="A committed handoff that the engine does not load in this time expires."
    )
    claim_timeout_s: PositiveSeconds = Field(
        10.0, description="Longest time that loading one handoff into the engine may take."
    )
    cpus: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list,
        description="CPU cores of the transfer service. Empty: any core; for workers on CPUs that "
        "baton up starts, cores that no prefill engine uses.",
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
