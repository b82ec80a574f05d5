"""Distributions of prompt and output lengths (`--prompt-tokens`, `--output-tokens`)."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from baton.load.traces import MAX_TOKENS

# Larger coefficients of variation make nearly all lengths 1.
_MAX_VARIATION = 100
ALLOWED = (
    f"N, LOW-HIGH (evenly) or MEAN~CV (log-normal), in tokens, from 1 to {MAX_TOKENS}, and a CV of "
    f"at most {_MAX_VARIATION}"
)
_FORM = re.compile(r"(\d{1,9})(?:-(\d{1,9})|~(\d{1,9}(?:\.\d{0,30})?|\.\d{1,30}))?")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A uniform or log-normal distribution of lengths.

    Attributes:
        low, high: Uniform: the bounds in tokens, both included. Log-normal: both are the mean.
        variation: Coefficient of variation of the log-normal distribution; 0 means uniform.
    """

    low: int
    high: int
    variation: float = 0.0

    @classmethod
    def parse(cls, text: str, name: str) -> Lengths:
        """Parses the value of the option `name`.

        Raises:
            ValueError: the text has none of the forms in ALLOWED.
        """
        found = _FORM.fullmatch(text.strip())
        if found is not None:
            low = int(found[1])
            high = int(found[2]) if found[2] else low
            variation = float(found[3] or 0)
            if 1 <= low <= high <= MAX_TOKENS and variation <= _MAX_VARIATION:
                return cls(low, high, variation)
        raise ValueError(f"{name} is {text!r:.60}; must be {ALLOWED}")

    def draw(self, chance: random.Random) -> int:
        if not self.variation:
            return chance.randint(self.low, self.high)
        square = math.log(1 + self.variation**2)
        mean = math.log(self.low) - square / 2
        length = round(chance.lognormvariate(mean, math.sqrt(square)))
        return min(max(1, length), MAX_TOKENS)
