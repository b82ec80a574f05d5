"""Answers in OpenAI's form: whole, and as chunks of a stream.

A chunk is made for every delta, so what is the same in all chunks of a choice is written once.

Source: https://platform.openai.com/docs/api-reference; vllm/entrypoints/openai/*/serving.py for
`stop_reason` and the forms of logprobs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from baton.client import Completion, Finished, TokenLogprob, Tokens, Usage
from baton.gateway.asks import Ask

DONE = b"data: [DONE]\n\n"
# JSON has no infinity; vLLM's floor for tokens that cannot be picked.
_LEAST_LOGPROB = -9999.0
_FINISH_REASONS = {"cancelled": "abort", "unspecified": None}


@dataclass(frozen=True, slots=True)
class Head:
    """What every answer to one request begins with.

    Attributes:
        created: seconds since the epoch.
    """

    ask: Ask
    model: str
    created: int

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.ask.id, "object": kind, "created": self.created, "model": self.model}


def whole(head: Head, completions: Sequence[Completion]) -> dict[str, Any]:
    """The answer to a request that does not stream; completions by the index of their choice."""
    choices = []
    for index, completion in enumerate(completions):
        finished = completion.finished
        logprobs = _logprobs(head.ask, completion.logprobs, 0)
        if head.ask.chat:
            message = {"role": "assistant", "content": completion.text}
            said: dict[str, Any] = {"message": message}
        else:
            said = {"text": completion.text}
        choices.append({"index": index, **said, "logprobs": logprobs, **_end(head.ask, finished)})
    kind = "chat.completion" if head.ask.chat else "text_completion"
    usages = [one.usage for one in completions]
    return {**head.fields(kind), "choices": choices, "usage": usage(head.ask, usages)}


class Chunks:
    """The chunks of one choice.

    Args:
        head: of the answer.
        index: of the choice.
        num_prompt_tokens: of its prompt.
    """

    def __init__(self, head: Head, index: int, num_prompt_tokens: int) -> None:
        self.ask = head.ask
        self._num_prompt_tokens, self._num_tokens = num_prompt_tokens, 0
        # What is the same in all chunks says nothing of one.
        self._all_alike = head.ask.num_logprobs is None and not head.ask.continuous_usage
        kind = "chat.completion.chunk" if head.ask.chat else "text_completion"
        fields = json.dumps(head.fields(kind), separators=(",", ":"))
        said = '"delta":{"content":' if head.ask.chat else '"text":'
        start = f'data: {fields[:-1]},"choices":[{{"index":{index},{said}'
        # The first chunk of a chat says who speaks.
        self._start = start.replace('"delta":{', '"delta":{"role":"assistant",', 1)
        self._next_start = start
        # Usage is in the last chunk alone; with include_usage the others say that it is not there.
        with_usage = head.ask.include_usage and not head.ask.continuous_usage
        close = '],"usage":null}\n\n' if with_usage else "]}\n\n"
        self._closed = "}" if head.ask.chat else ""
        self._plain_end = f'{self._closed},"logprobs":null,"finish_reason":null}}{close}'
        self._close = close
        self._num_chars = 0

    def chunk(self, tokens: Tokens | None, finished: Finished | None) -> bytes:
        """One event of the stream: tokens, the end, or both."""
        text = tokens.text if tokens is not None else ""
        start, self._start = self._start, self._next_start
        if finished is None and self._all_alike:
            return f"{start}{quoted(text)}{self._plain_end}".encode()
        logprobs = _logprobs(self.ask, tokens.logprobs, self._num_chars) if tokens else None
        if not self.ask.chat and logprobs is not None:
            self._num_chars += sum(map(len, logprobs["tokens"]))
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": None}
        if finished is not None:
            rest |= _end(self.ask, finished)
        end = json.dumps(rest, separators=(",", ":"))[1:]
        close = self._close
        if self.ask.continuous_usage:
            self._num_tokens += len(tokens.token_ids) if tokens is not None else 0
            so_far = Usage(self._num_prompt_tokens, self._num_tokens, 0)
            close = f'],"usage":{json.dumps(usage(self.ask, [so_far]))}}}\n\n'
        return f"{start}{quoted(text)}{self._closed},{end}{close}".encode()


def usage_chunk(head: Head, usages: Sequence[Usage]) -> bytes:
    """The last chunk of a stream that asked for usage."""
    kind = "chat.completion.chunk" if head.ask.chat else "text_completion"
    fields = {**head.fields(kind), "choices": [], "usage": usage(head.ask, usages)}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def usage(ask: Ask, usages: Sequence[Usage]) -> dict[str, Any]:
    """Tokens of all choices; a prompt counts once, however many choices it has."""
    firsts = usages[:: ask.n]
    num_prompt = sum(one.prompt_tokens for one in firsts)
    num_output = sum(one.completion_tokens for one in usages)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_prompt_tokens for one in firsts)},
    }


def _end(ask: Ask, finished: Finished) -> dict[str, Any]:
    stop: str | int | None = finished.stop or None
    asked = ask.options.get("stop") or ()
    if stop is not None and stop not in ([asked] if isinstance(asked, str) else asked):
        stop = int(stop)
    reason = _FINISH_REASONS.get(finished.reason, finished.reason)
    return {"finish_reason": reason, "stop_reason": stop}


def _logprobs(
    ask: Ask, positions: Iterable[Sequence[TokenLogprob]], num_chars: int
) -> dict[str, Any] | None:
    """Of some positions.

    Args:
        ask: whether and how many.
        positions: per token, the chosen one first.
        num_chars: of the tokens before.
    """
    if ask.num_logprobs is None:
        return None
    if ask.chat:
        return {"content": [_chat_position(position, ask.num_logprobs) for position in positions]}
    found: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for position in positions:
        chosen = position[0]
        found["tokens"].append(chosen.text)
        found["token_logprobs"].append(_finite(chosen.logprob))
        # The first of equal texts is the chosen token, or the likelier one.
        top = {one.text: _finite(one.logprob) for one in reversed(position)}
        found["top_logprobs"].append(dict(reversed(top.items())))
        found["text_offset"].append(num_chars)
        num_chars += len(chosen.text)
    return found


def _chat_position(position: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
    # The chosen token may be there twice: first, and where it ranks.
    ranked = sorted({one.token_id: one for one in position}.values(), key=lambda one: one.rank)
    top = [_chat_token(one) for one in ranked if one.rank <= num_top]
    return {**_chat_token(position[0]), "top_logprobs": top}


def _chat_token(one: TokenLogprob) -> dict[str, Any]:
    encoded = list(one.text.encode("utf-8", errors="replace"))
    return {"token": one.text, "logprob": _finite(one.logprob), "bytes": encoded}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
