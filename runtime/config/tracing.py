"""The section on spans."""

from __future__ import annotations

from pydantic import Field, field_validator

from baton.runtime.section import Section


class TracingConfig(Section):
    """Spans in the traces of requests."""

    otlp_endpoint: str = Field(
        "",
        description="http://host:port (or https) of an OpenTelemetry collector, OTLP over gRPC; "
        "gets the stages of requests whose traceparent is sampled; empty: nobody does",
    )
    tail_share: float | None = Field(
        0.01,
        ge=0,
        le=1,
        description="of other requests, beside all that failed and all that were slower than 99 % "
        "lately; null: none of them",
    )

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_endpoint(cls, value: str) -> str:
        scheme, separator, address = value.partition("://")
        host, _, port = address.rpartition(":")
        if value and not (
            separator
            and scheme in ("http", "https")
            and host
            and "/" not in host
            and port.isdecimal()
            and 1 <= int(port) <= 65535
        ):
            raise ValueError("must be http://host:port or https://host:port")
        return value
