"""The TTFT target of a request, which may grow with its prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TtftTarget:
    """Target of the time to first token: a base, and a part in proportion to the prompt.

    A prompt of 100,000 tokens takes seconds on any worker, so one number for all prompts is either
    hopeless for long prompts or says nothing about short ones.

    Attributes:
        base_s: Target of an empty prompt, in seconds.
        s_per_1k_tokens: Seconds that are added per 1,000 prompt tokens. 0: one target for all.
    """

    base_s: float
    s_per_1k_tokens: float = 0.0

    @classmethod
    def from_ms(cls, base_ms: float | None, ms_per_1k_tokens: float = 0.0) -> TtftTarget | None:
        """Returns the target of a configuration or message; None for a base of 0 or None."""
        return cls(base_ms / 1e3, ms_per_1k_tokens / 1e3) if base_ms else None

    def of(self, num_prompt_tokens: float) -> float:
        """Returns the target of a request in seconds.

        Args:
            num_prompt_tokens: Tokens of the whole prompt, cached tokens included.
        """
        return self.base_s + self.growth_s(num_prompt_tokens)

    def growth_s(self, num_prompt_tokens: float) -> float:
        """Returns the part of a request's target that grows with its prompt, in seconds."""
        return self.s_per_1k_tokens * num_prompt_tokens / 1000

    def scaled(self, factor: float) -> TtftTarget:
        """Returns the target that is `factor` times as long for every request."""
        return TtftTarget(self.base_s * factor, self.s_per_1k_tokens * factor)

    @property
    def brief(self) -> str:
        """The target for a table, such as "500 ms" or "500 ms + 1000 ms/1k"."""
        text = f"{_milliseconds(self.base_s)} ms"
        if self.s_per_1k_tokens:
            text += f" + {_milliseconds(self.s_per_1k_tokens)} ms/1k"
        return text

    def __str__(self) -> str:
        """The target in words, such as "500 ms" or "500 ms + 1000 ms per 1,000 prompt tokens"."""
        text = f"{_milliseconds(self.base_s)} ms"
        if self.s_per_1k_tokens:
            text += f" + {_milliseconds(self.s_per_1k_tokens)} ms per 1,000 prompt tokens"
        return text


def check_slope(base_ms: float | None, ms_per_1k_tokens: float) -> None:
    """Raises ValueError if a target grows with the prompt but has no base."""
    if ms_per_1k_tokens and not base_ms:
        raise ValueError(
            f"ttft_ms_per_1k_tokens is {ms_per_1k_tokens:g}, but ttft_ms is not set; must be 0 "
            "without ttft_ms"
        )


def _milliseconds(seconds: float) -> str:
    value = round(seconds * 1e3, 6)
    return f"{value:.0f}" if value.is_integer() else f"{value:g}"
