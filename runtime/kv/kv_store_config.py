"""The `kv_store` section: where copies of KV blocks are kept below the engine's cache."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from baton.runtime.process.free_memory import free_bytes
from baton.runtime.section import Section

# Share of the free memory that a worker takes by default, and the most that it takes.
_SHARE, _MOST_BYTES = 0.1, 32 * 2**30


class KvStoreConfig(Section):
    """Settings of the KV store below each engine's cache."""

    host_bytes: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        None,
        description="Host memory of one worker for a copy of every full KV block, made when the "
        "block fills, in bytes; 0: off. null: a tenth of the memory that is free when the worker "
        "starts, at most 32 GiB.",
    )
    disk_dir: str = Field(
        "",
        description="Directory in which each worker of this host keeps KV blocks in files, beside "
        "host memory and for longer; a restarted worker finds them again. Workers share it. Empty: "
        "off.",
    )
    disk_bytes: Annotated[int, Field(ge=1, le=2**63 - 1)] = Field(
        100 * 2**30, description="Most bytes of the files of one worker."
    )
    disk_bytes_per_s: Annotated[int, Field(ge=1, le=2**63 - 1)] = Field(
        10**9,
        description="Speed of the disk when a worker loads KV blocks, in bytes per second, until "
        "its first load is measured. The coordinator uses the speed to choose a worker.",
    )
    share: Literal["tenant", "all"] = Field(
        "tenant",
        description="Requests that may use the KV blocks of a request, in the engines' caches and "
        "in the KV store: those of the same tenant (tenant), or all. With all, a tenant can find "
        "out by the time to first token that another tenant has sent the same beginning of a "
        "prompt.",
    )
    fetch: bool = Field(
        True,
        description="Whether a worker that computes a prompt may get the prompt's cached beginning "
        "from another worker, when that is predicted to be faster than computing it.",
    )

    @model_validator(mode="after")
    def _disk_needs_host_memory(self) -> KvStoreConfig:
        if self.disk_dir and self.host_bytes == 0:
            raise ValueError(
                "disk_dir is set and host_bytes is 0; blocks go to disk through host memory: set "
                "host_bytes to more, or leave it out"
            )
        return self

    def resolved_host_bytes(self) -> int:
        """Returns host_bytes, or its default for the memory that is free now."""
        if self.host_bytes is not None:
            return self.host_bytes
        return min(_MOST_BYTES, int(_SHARE * free_bytes()))
