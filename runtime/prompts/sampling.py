"""Sampling parameters: what the coordinator allows, what vLLM gets, what carries state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed values of a number.

    Attributes:
        low: Smallest value.
        high: Largest value.
        excludes_low: Whether `low` itself is refused.
    """

    low: float
    high: float
    excludes_low: bool = False


# Optional fields of SamplingParams that vLLM has under the same name, with the range that the
# coordinator checks. None: every value is allowed, or coordinator/server/validation.py has its own
# check.
OPTIONAL_FIELDS: Mapping[str, Range | None] = {
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0, excludes_low=True),
    "min_p": Range(0.0, 1.0),
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "repetition_penalty": Range(0.0, 2.0, excludes_low=True),
    "top_k": None,
    "seed": None,
    "skip_special_tokens": None,
    "logprobs": None,
    "prompt_logprobs": None,
}


def given(sampling: common_pb2.SamplingParams, name: str) -> bool:
    """Returns whether a field of OPTIONAL_FIELDS is set."""
    return sampling.HasField(name)  # type: ignore[arg-type]  # All of them are optional fields.


def needs_exact_state(sampling: common_pb2.SamplingParams) -> bool:
    """Whether a continued request must replay its known tokens through the sampler.

    Greedy and unseeded sampling depend on the tokens alone, so the request continues from prompt +
    known tokens. Seeded generators, penalties over the output, bad words and grammars carry state
    from token to token, so the known tokens are forced, one decode step each.
    """
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    return (
        (sampling.HasField("seed") and temperature > 0)
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or (sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1)
        or bool(sampling.bad_words)
        or sampling.HasField("structured_output")
    )
