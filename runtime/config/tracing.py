"""The `tracing` section."""

from __future__ import annotations

from pydantic import Field, field_validator

from baton.runtime.section import Section


class TracingConfig(Section):
    """Export of spans in the traces of requests."""

    otlp_endpoint: str = Field(
        "",
        description="http://host:port (or https) of an OpenTelemetry collector, OTLP over gRPC. It "
        "gets the spans of requests whose traceparent is sampled. Empty: no spans are exported.",
    )
    tail_share: float | None = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of the other requests that is exported too, beside all failed requests "
        "and recent ones slower than 99 %. null: none of these.",
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
