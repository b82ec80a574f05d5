"""Decides how a request may continue on another worker, by its sampling parameters."""

from __future__ import annotations

from baton.v1 import common_pb2


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
