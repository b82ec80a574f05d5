"""Whether the tokens that a client resumes with are already the whole output."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from baton.v1 import common_pb2

# Of the tokens looked at for a stop string: tokens without text of their own are few.
_TOKENS_PER_CHAR, _MORE_TOKENS = 2, 16
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def known_stop(
    token_ids: Sequence[int],
    sampling: common_pb2.SamplingParams,
    eos_token_id: int | None,
    extra_eos_token_ids: Collection[int],
    decode: Callable[[Sequence[int], bool], str],
) -> str | None:
    """What the last token has ended the output by, as Finished.stop says it; None: nothing has.

    A client may have lost only that message. The rules are vLLM's: v1/core/sched/utils.py,
    check_stop, and v1/engine/detokenizer.py, check_stop_strings.

    Args:
        token_ids: the output that the client has.
        sampling: of the request.
        eos_token_id: the tokenizer's end of sequence.
        extra_eos_token_ids: of the model's generation config; they count as stop tokens.
        decode: text of tokens; the flag says whether special ones are left out.
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
