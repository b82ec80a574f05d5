"""The `kv_store` section: where KV blocks are kept when they leave the engine's cache."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from baton.runtime.section import Section


class KvStoreConfig(Section):
    """Settings of the KV store below each engine's cache."""

    host_bytes: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = Field(
        None,
        description="Host memory in which each worker keeps KV blocks of prompts and answers that "
        "its engine's cache evicts, in bytes; 0: off. null: a tenth of the memory that is free "
        "when the worker starts, at most 32 GiB.",
    )
