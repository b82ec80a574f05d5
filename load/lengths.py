"""Distributions of prompt and output lengths (`--prompt-tokens`, `--output-tokens`)."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

ALLOWED = "N, LOW-HIGH (evenly) or MEAN~CV (log-normal), in tokens, at least 1"
_FORM = re.compile(r"(\d+)(?:-(\d+)|~(\d+(?:\.\d*)?|\.\d+))?")


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
            if 1 <= low <= high:
                return cls(low, high, float(found[3] or 0))
        raise ValueError(f"{name} is {text!r}; must be {ALLOWED}")

    def draw(self, chance: random.Random) -> int:
        if not self.variation:
            return chance.randint(self.low, self.high)
        square = math.log(1 + self.variation**2)
        mean = math.log(self.low) - square / 2
        return max(1, round(chance.lognormvariate(mean, math.sqrt(square))))
