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
from typing import TYPE_CHECKING, Any

from baton.client import Completion, Finished, TokenLogprob, Tokens, Usage
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.rendered_prompt import RenderedPrompt

if TYPE_CHECKING:
    from baton.gateway.vllm_parsers import ChoiceOutputParser

DONE = b"data: [DONE]\n\n"
# JSON has no infinity; vLLM's floor for tokens that cannot be picked.
_LEAST_LOGPROB = -9999.0
_FINISH_REASONS = {"cancelled": "abort", "unspecified": None}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every answer to one request begins with.

    Attributes:
        created: seconds since the epoch.
    """

    request: ParsedRequest
    model: str
    created: int

    def fields(self, kind: str) -> dict[str, Any]:
        return {"id": self.request.id, "object": kind, "created": self.created, "model": self.model}


def full_response(
    head: ResponseHead,
    completions: Sequence[Completion],
    prompts: Sequence[RenderedPrompt],
    parsers: Sequence[ChoiceOutputParser | None] = (),
) -> dict[str, Any]:
    """The answer to a request that does not stream.

    Args:
        head: of it.
        completions: by the index of their choice.
        prompts: what is shown of each.
        parsers: of the choices' outputs; without one they are as the model wrote them.
    """
    request, choices = head.request, []
    of_prompts = [
        _of_prompt(request, completions[index * request.n].finished, prompt)
        for index, prompt in enumerate(prompts)
    ]
    for index, completion in enumerate(completions):
        prompt, finished = prompts[index // request.n], completion.finished
        text, positions, token_ids = completion.text, completion.logprobs, completion.token_ids
        if request.only_prompt:
            text, positions, token_ids = "", (), ()
        if request.echo:
            text, positions = prompt.text + text, finished.prompt_logprobs + positions
        logprobs = _logprobs(request, positions, 0, prompt.first_token)
        parser = parsers[index] if parsers else None
        if parser is not None:
            said: dict[str, Any] = {"message": parser.message(text, token_ids)}
        elif request.chat:
            said = {"message": {"role": "assistant", "content": text}}
        else:
            said = {"text": text}
        end = _end(request, finished, parser)
        choice = {"index": index, **said, "logprobs": logprobs, **end}
        if request.return_token_ids:
            choice["token_ids"] = token_ids
        # As vLLM has them: a chat has one prompt, which is the whole answer's.
        choices.append(choice if request.chat else choice | of_prompts[index // request.n])
    kind = "chat.completion" if request.chat else "text_completion"
    found = {**head.fields(kind), "choices": choices}
    if request.chat:
        found |= of_prompts[0]
    return found | {"usage": usage(request, [one.usage for one in completions], parsers)}


class ChunkRenderer:
    """The chunks of one choice.

    Args:
        head: of the answer.
        index: of the choice.
        num_prompt_tokens: of its prompt.
        prompt: what is shown of it, with the first chunk.
        parser: of its output; None: deltas are as the model wrote them.
    """

    def __init__(
        self,
        head: ResponseHead,
        index: int,
        num_prompt_tokens: int,
        prompt: RenderedPrompt,
        parser: ChoiceOutputParser | None = None,
    ) -> None:
        self.request, self._parser = head.request, parser
        self._first: dict[str, Any] = {"role": "assistant"}
        self._echo = prompt.text if head.request.echo else ""
        self._num_prompt_tokens, self._num_tokens = num_prompt_tokens, 0
        # What is the same in all chunks says nothing of one.
        self._all_alike = (
            head.request.num_logprobs is None
            and not head.request.continuous_usage
            and not head.request.return_token_ids
            and not head.request.only_prompt
        )
        kind = "chat.completion.chunk" if head.request.chat else "text_completion"
        fields = json.dumps(head.fields(kind), separators=(",", ":"))
        said = '"delta":{"content":' if head.request.chat else '"text":'
        if parser is not None:
            # What is in a delta differs.
            said = '"delta":'
        start = f'data: {fields[:-1]},"choices":[{{"index":{index},{said}'
        # The first chunk of a chat says who speaks.
        self._start = start.replace('"delta":{', '"delta":{"role":"assistant",', 1)
        if head.request.return_token_ids:
            # It has the prompt's tokens too: a chat's beside its choices, as in vLLM.
            ids = json.dumps(list(prompt.token_ids), separators=(",", ":"))
            before = '"choices":[' if head.request.chat else '"text":'
            self._start = self._start.replace(before, f'"prompt_token_ids":{ids},{before}', 1)
        self._next_start = start
        # Usage is in the last chunk alone; with include_usage the others say that it is not there.
        with_usage = head.request.include_usage and not head.request.continuous_usage
        close = '],"usage":null}\n\n' if with_usage else "]}\n\n"
        self._closed = "}" if head.request.chat and parser is None else ""
        self._plain_end = f'{self._closed},"logprobs":null,"finish_reason":null}}{close}'
        self._close = close
        self._num_chars = 0

    def render(self, tokens: Tokens | None, finished: Finished | None) -> bytes:
        """One event of the stream: tokens, the end, or both. Empty: there is nothing to say yet."""
        if self.request.only_prompt:
            tokens = None
        said = self._said(tokens, finished)
        if not said:
            return b""
        start, self._start = self._start, self._next_start
        if finished is None and self._all_alike:
            return f"{start}{said}{self._plain_end}".encode()
        logprobs = _logprobs(self.request, tokens.logprobs, self._num_chars) if tokens else None
        if not self.request.chat and logprobs is not None:
            self._num_chars += sum(map(len, logprobs["tokens"]))
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": None}
        if finished is not None:
            rest |= _end(self.request, finished, self._parser)
        if self.request.return_token_ids:
            rest["token_ids"] = tokens.token_ids if tokens is not None else ()
        end = json.dumps(rest, separators=(",", ":"))[1:]
        close = self._close
        if self.request.continuous_usage:
            self._num_tokens += len(tokens.token_ids) if tokens is not None else 0
            so_far = Usage(self._num_prompt_tokens, self._num_tokens, 0)
            so_far_used = usage(self.request, [so_far], [self._parser])
            close = f'],"usage":{json.dumps(so_far_used)}}}\n\n'
        return f"{start}{said}{self._closed},{end}{close}".encode()

    def _said(self, tokens: Tokens | None, finished: Finished | None) -> str:
        """The text, or the whole delta where outputs are parsed, as JSON."""
        if self._parser is None:
            text, self._echo = self._echo + (tokens.text if tokens is not None else ""), ""
            return quoted(text)
        delta = self._parser.delta(tokens, finished=finished is not None)
        if delta is None and finished is None and self._all_alike:
            return ""
        said, self._first = {**self._first, **(delta or {})}, {}
        return json.dumps(said, separators=(",", ":"))


def usage_chunk(
    head: ResponseHead, usages: Sequence[Usage], parsers: Sequence[ChoiceOutputParser | None] = ()
) -> bytes:
    """The last chunk of a stream that asked for usage."""
    kind = "chat.completion.chunk" if head.request.chat else "text_completion"
    fields = {**head.fields(kind), "choices": [], "usage": usage(head.request, usages, parsers)}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def usage(
    request: ParsedRequest,
    usages: Sequence[Usage],
    parsers: Sequence[ChoiceOutputParser | None] = (),
) -> dict[str, Any]:
    """Tokens of all choices; a prompt counts once, however many choices it has."""
    firsts = usages[:: request.n]
    num_prompt = sum(one.prompt_tokens for one in firsts)
    num_output = sum(one.completion_tokens for one in usages)
    found: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_prompt_tokens for one in firsts)},
    }
    reasoned = [one.num_reasoning_tokens for one in parsers if one is not None]
    if any(one is not None for one in reasoned):
        found["completion_tokens_details"] = {"reasoning_tokens": sum(one or 0 for one in reasoned)}
    return found


def _end(
    request: ParsedRequest, finished: Finished, parser: ChoiceOutputParser | None
) -> dict[str, Any]:
    stop: str | int | None = finished.stop or None
    asked = request.options.get("stop") or ()
    if stop is not None and stop not in ([asked] if isinstance(asked, str) else asked):
        stop = int(stop)
    reason = _FINISH_REASONS.get(finished.reason, finished.reason)
    if parser is not None:
        reason = parser.finish_reason(reason)
    return {"finish_reason": reason, "stop_reason": stop}


def _of_prompt(
    request: ParsedRequest, finished: Finished, prompt: RenderedPrompt
) -> dict[str, Any]:
    """What an answer says of a prompt when it is asked to."""
    found: dict[str, Any] = {}
    if request.num_prompt_logprobs is not None:
        found["prompt_logprobs"] = [
            {
                str(one.token_id): {
                    "logprob": _finite(one.logprob),
                    "rank": one.rank,
                    "decoded_token": one.text,
                }
                for one in position
            }
            or None
            for position in finished.prompt_logprobs
        ]
    if request.return_token_ids:
        found["prompt_token_ids"] = prompt.token_ids
    return found


def _logprobs(
    request: ParsedRequest,
    positions: Iterable[Sequence[TokenLogprob]],
    num_chars: int,
    first_token: str = "",
) -> dict[str, Any] | None:
    """Of some positions.

    Args:
        request: whether and how many.
        positions: per token, the chosen one first.
        num_chars: of the tokens before.
        first_token: of a prompt, which nothing is known of but its text.
    """
    if request.num_logprobs is None:
        return None
    if request.chat:
        return {
            "content": [_chat_position(position, request.num_logprobs) for position in positions]
        }
    found: dict[str, Any] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for position in positions:
        text = position[0].text if position else first_token
        found["tokens"].append(text)
        found["token_logprobs"].append(_finite(position[0].logprob) if position else None)
        # Of a prompt there may be more. The first of equal texts is the chosen token, or the
        # likelier one.
        shown = position[: request.num_logprobs + 1]
        top = {one.text: _finite(one.logprob) for one in reversed(shown)}
        found["top_logprobs"].append(dict(reversed(top.items())) or None)
        found["text_offset"].append(num_chars)
        num_chars += len(text)
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
