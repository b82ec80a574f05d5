"""Measurements of single requests that the autoscaler compares with TTFT targets."""

from __future__ import annotations

from typing import NamedTuple


class Work(NamedTuple):
    """Prefill work of one request.

    Attributes:
        work_s: seconds of work, without cached prefixes.
        num_prompt_tokens: tokens of the whole prompt, by which a TTFT target may grow.
    """

    work_s: float
    num_prompt_tokens: int = 0


class FirstToken(NamedTuple):
    """First token of one request.

    Attributes:
        ttft_s: time to first token.
        num_prompt_tokens: tokens of the whole prompt, by which a TTFT target may grow.
        revision: revision of the fleet that generated the token.
    """

    ttft_s: float
    num_prompt_tokens: int
    revision: str
