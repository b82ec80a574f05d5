"""The `steps` section: how many prompt tokens a worker computes in one step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from baton.runtime.section import Section


class StepsConfig(Section):
    """Steps of the engines.

    The ITL target is scaling.targets.interactive.itl_ms, or the one that a request named.
    """

    scheduler: Literal["baton", "vllm"] = Field(
        "baton",
        description="Scheduler that fills steps with prompt tokens. baton: as many as the ITL "
        "target of the decoding requests leaves, shortest prompts first. vllm: vLLM's own "
        "scheduler (simulated: first come, first served).",
    )
    longest_gap_ms: float | None = Field(
        None,
        gt=0,
        description="Longest step beside interactive requests that decode: the target of a single "
        "gap between tokens. null: 1.2 times the ITL target, or three times in an elastic cell of "
        "few workers with long outputs and short prompts. Never less than the ITL target. With "
        "more than 1.2 times, a step may exceed the ITL target while prompts wait, if the next "
        "steps can be shorter.",
    )
    prompt_step_ms: float = Field(
        200.0,
        gt=0,
        description="Longest step without interactive requests that decode, so that a short "
        "prompt does not wait for a whole long one. Where a step's fixed part is long, interactive "
        "prompts that can be in time may make it up to three times as long while nothing decodes.",
    )
