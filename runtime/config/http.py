"""The `http` section, for the gateway."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, field_validator

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


class BatchesConfig(Section):
    """Files and batches of OpenAI's API, which one gateway process keeps in a directory."""

    dir: str = Field(
        "",
        description="Directory of this gateway process for files and batches; made if it does not "
        "exist. Empty: the routes /v1/files and /v1/batches are off.",
    )
    max_running: PositiveInt = Field(
        256,
        description="Lines of all batches that run at the same time; the callers share them.",
    )
    max_bytes: PositiveInt = Field(
        4 * 2**30,
        description="Size of all files and results, of which one caller can use three quarters. At "
        "the limit, uploads and new batches are refused, and running batches wait for room.",
    )
    max_files: PositiveInt = Field(
        10_000,
        description="Uploaded files that are kept at a time, of which one caller can have three "
        "quarters; also the limit of batches.",
    )
    max_file_bytes: PositiveInt = Field(200 * 2**20, description="Size of one uploaded file.")
    max_lines: PositiveInt = Field(50_000, description="Lines of one batch.")
    expires_s: PositiveSeconds = Field(
        30 * 86400.0,
        description="Files, results and ended batches are deleted after this, unless a request "
        "sets another time.",
    )


class PoolingConfig(Section):
    """A server of a pooling model: a plain `vllm serve MODEL --runner pooling`."""

    model: str = Field(min_length=1, description="Name of the model in requests.")
    url: str = Field(
        pattern=r"^https?://[^/?#\s]+$",
        description="URL of the server, such as http://127.0.0.1:8100. Servers with the same model "
        "share its requests.",
    )
    timeout_s: PositiveSeconds = Field(60.0, description="Longest time of one request.")

    @field_validator("url")
    @classmethod
    def _can_be_dialled(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            is_right = bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_right = False
        if not is_right:
            raise ValueError("must be http:// or https://, a host, and a port of 1 to 65535 if any")
        return value


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
        1024,
        description="Generations that run at the same time. When there are as many, a caller that "
        "has less than its share may run further ones, until twice the limit is reached.",
    )
    max_choices: PositiveInt = Field(
        128, description="Answers of one HTTP request: its number of prompts times n."
    )
    max_body_bytes: PositiveInt = Field(
        8 * 2**20,
        description="Size of one request's body. All incomplete bodies together may have 32 times "
        "as many bytes.",
    )
    stored_responses_bytes: int = Field(
        64 * 2**20,
        ge=0,
        description="Memory for finished responses of /v1/responses, which previous_response_id "
        "names; each is kept for an hour at most. 0: none is stored.",
    )
    batches: BatchesConfig = Field(default_factory=BatchesConfig)
    pooling: list[PoolingConfig] = Field(
        default_factory=list,
        description="Servers that answer /v1/embeddings, /v1/rerank and /v1/score. Empty: these "
        "routes refuse.",
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
