"""The gateway's section."""

from __future__ import annotations

from pydantic import Field

from baton.runtime.section import PositiveInt, PositiveSeconds, Section


class CellConfig(Section):
    """A cell behind `baton gateway`: a coordinator with its pools."""

    coordinators: str = Field(
        min_length=1, description="HOST:PORT of its coordinator; several, of which one serves"
    )
    tool_call_parser: str = Field("", description="as the key of this name outside")
    reasoning_parser: str = Field("", description="as the key of this name outside")


class HttpConfig(Section):
    """The OpenAI-compatible gateway."""

    listen: str = Field(
        "127.0.0.1:8000",
        description="host:port; port 0 picks a free one; empty: baton up starts no gateway",
    )
    cells: list[CellConfig] = Field(
        default_factory=list,
        description="that baton gateway stands before; empty: those of its --coordinator",
    )
    max_connections: PositiveInt = Field(
        4096,
        description="beyond them those without a whole request are closed, else new ones refused",
    )
    max_running_requests: PositiveInt = Field(1024, description="generations at a time")
    max_choices: PositiveInt = Field(128, description="of one request: its prompts times n")
    max_body_bytes: PositiveInt = Field(8 * 2**20, description="of one request")
    max_header_bytes: PositiveInt = Field(32 * 2**10, description="request line and headers")
    read_timeout_s: PositiveSeconds = Field(
        30.0, description="longest wait for a whole head, and for a whole body"
    )
    write_timeout_s: PositiveSeconds = Field(
        60.0, description="a client that takes nothing for so long is disconnected"
    )
    keep_alive_s: PositiveInt = Field(75, description="of idle connections")
    drain_timeout_s: PositiveSeconds = Field(30.0, description="SIGTERM: longest wait for requests")
