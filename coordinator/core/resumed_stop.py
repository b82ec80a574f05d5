"""Detects that the known tokens of a resumed request are already its whole output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from baton.v1 import common_pb2

# Number of last tokens that are searched for a stop string: per character of the longest one, and
# in addition, because a token may be a part of a character or have no text.
_TOKENS_PER_CHAR, _MORE_TOKENS = 2, 16
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def known_stop(
    token_ids: Sequence[int],
    sampling: common_pb2.SamplingParams,
    eos_token_id: int | None,
    extra_eos_token_ids: Collection[int],
    decode: Callable[[Sequence[int], bool], str],
) -> str | None:
    """Returns the stop that the last known token ended the output with, or None.

    The client may have lost only the final message. The rules are vLLM's: check_stop in
    v1/core/sched/utils.py, and check_stop_strings in v1/engine/detokenizer.py.

    Args:
        token_ids: Output tokens that the client has.
        sampling: Sampling parameters of the request.
        eos_token_id: End-of-sequence token of the tokenizer.
        extra_eos_token_ids: End tokens of the model's generation config; they count as stop tokens.
        decode: Returns the text of tokens; the flag leaves out special tokens.

    Returns:
        The stop in the form of Finished.stop; empty for an end-of-sequence token.
    """
    if not len(token_ids) or len(token_ids) < sampling.min_tokens:
        return None
    last = token_ids[-1]
    if not sampling.ignore_eos and last == eos_token_id:
        return ""
    if last in sampling.stop_token_ids:
        return str(last)
    if not sampling.ignore_eos and last in extra_eos_token_ids:
        return str(last)
    if not sampling.stop or len(token_ids) <= sampling.min_tokens:
        return None
    num_tokens = _TOKENS_PER_CHAR * max(map(len, sampling.stop)) + _MORE_TOKENS
    skips = sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True
    tail = token_ids[-num_tokens:]
    text, before = decode(tail, skips), decode(tail[:-1], skips).rstrip(_INCOMPLETE)
    ends = [
        (at + len(stop), order, stop)
        for order, stop in enumerate(sampling.stop)
        if (at := text.find(stop, max(0, len(before) + 1 - len(stop)))) >= 0
    ]
    return min(ends)[2] if ends else None
