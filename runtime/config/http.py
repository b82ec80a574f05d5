"""The `http` section, for the gateway."""

from __future__ import annotations

from pydantic import Field

from baton.runtime.section import PositiveInt, PositiveSeconds, Section


class CellConfig(Section):
    """A cell behind `baton gateway`: a coordinator with its pools of workers."""

    coordinators: str = Field(
        min_length=1,
        description="HOST:PORT of the cell's coordinator; comma-separated when several stand by, "
        "of which one serves.",
    )
    tool_call_parser: str = Field("", description="Like the top-level key, for this cell.")
    reasoning_parser: str = Field("", description="Like the top-level key, for this cell.")


class HttpConfig(Section):
    """The OpenAI-compatible gateway."""

    listen: str = Field(
        "127.0.0.1:8000",
        description="host:port of the gateway; port 0 picks a free one. Empty: baton up starts no "
        "gateway.",
    )
    cells: list[CellConfig] = Field(
        default_factory=list,
        description="Cells that baton gateway sends requests to. Empty: one cell, at its "
        "--coordinator.",
    )
    max_connections: PositiveInt = Field(
        4096,
        description="Connections; at the limit, a connection without a complete request is closed "
        "for a new one, or else the new one is refused.",
    )
    max_running_requests: PositiveInt = Field(
        1024, description="Generations that run at the same time."
    )
    max_choices: PositiveInt = Field(
        128, description="Answers of one HTTP request: its number of prompts times n."
    )
    max_body_bytes: PositiveInt = Field(8 * 2**20, description="Size of one request's body.")
    stored_responses_bytes: int = Field(
        64 * 2**20,
        ge=0,
        description="Memory for finished responses of /v1/responses, which previous_response_id "
        "names; each is kept for an hour at most. 0: none is stored.",
    )
    max_header_bytes: PositiveInt = Field(
        32 * 2**10, description="Size of one request's request line and headers."
    )
    read_timeout_s: PositiveSeconds = Field(
        30.0, description="Longest wait for complete headers, and for a complete body."
    )
    write_timeout_s: PositiveSeconds = Field(
        60.0, description="A client that reads nothing for this long is disconnected."
    )
    keep_alive_s: PositiveInt = Field(75, description="An idle connection is closed after this.")
    drain_timeout_s: PositiveSeconds = Field(
        30.0, description="On SIGTERM: longest wait for running requests."
    )
