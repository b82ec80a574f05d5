"""Renders responses in OpenAI's form: complete responses and the chunks of a stream.

A chunk is rendered for every delta, so the constant parts of a choice's chunks are serialized once.

Source: https://platform.openai.com/docs/api-reference; vllm/entrypoints/openai/*/serving.py for
`stop_reason` and the forms of logprobs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quoted
from typing import TYPE_CHECKING, Any

from baton.client import Completion, Finished, TokenLogprob, Tokens, Usage
from baton.gateway.parsed_request import ParsedRequest
from baton.gateway.rendered_prompt import RenderedPrompt

if TYPE_CHECKING:
    from baton.gateway.vllm_parsers import ChoiceOutputParser

DONE = b"data: [DONE]\n\n"
# vLLM's value for tokens that cannot be sampled; JSON has no infinity.
_MIN_LOGPROB = -9999.0
_FINISH_REASONS = {"cancelled": "abort", "unspecified": None}


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The fields that all responses and chunks of one request share.

    Attributes:
        request: The request.
        model: Name of the model or adapter that serves it.
        created: Unix time in seconds.
    """

    request: ParsedRequest
    model: str
    created: int

    def fields(self, kind: str) -> dict[str, Any]:
        """Returns the fields for a response object of a kind, such as "chat.completion"."""
        return {"id": self.request.id, "object": kind, "created": self.created, "model": self.model}


def full_response(
    head: ResponseHead,
    completions: Sequence[Completion],
    prompts: Sequence[RenderedPrompt],
    parsers: Sequence[ChoiceOutputParser | None] = (),
) -> dict[str, Any]:
    """Renders the response of a request that does not stream.

    Args:
        head: Shared fields of the response.
        completions: Output of each choice, in order of the choice index.
        prompts: The shown parts of each prompt.
        parsers: Output parser of each choice; empty or None: outputs are not parsed.
    """
    request, choices = head.request, []
    prompt_details = [
        _prompt_details(request, completions[index * request.n].finished, prompt)
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
            content: dict[str, Any] = {"message": parser.message(text, token_ids)}
        elif request.chat:
            content = {"message": {"role": "assistant", "content": text}}
        else:
            content = {"text": text}
        end = finish_fields(request, finished, parser)
        choice = {"index": index, **content, "logprobs": logprobs, **end}
        if request.return_token_ids:
            choice["token_ids"] = token_ids
        # As in vLLM: a chat has one prompt, whose details belong to the response, not to a choice.
        choices.append(choice if request.chat else choice | prompt_details[index // request.n])
    kind = "chat.completion" if request.chat else "text_completion"
    found = {**head.fields(kind), "choices": choices}
    if request.chat:
        found |= prompt_details[0]
    return found | {"usage": usage(request, [one.usage for one in completions], parsers)}


class ChunkRenderer:
    """Renders the chunks of one choice of a streamed response.

    Args:
        head: Shared fields of the response.
        index: Index of the choice.
        num_prompt_tokens: Number of tokens of the choice's prompt.
        prompt: The parts of the prompt that the first chunk shows.
        parser: Output parser of the choice; None: outputs are not parsed.

    """

    def __init__(
        self,
        head: ResponseHead,
        index: int,
        num_prompt_tokens: int,
        prompt: RenderedPrompt,
        parser: ChoiceOutputParser | None = None,
    ) -> None:
        self._request, self._parser = head.request, parser
        self._first: dict[str, Any] = {"role": "assistant"}
        self._echo = prompt.text if head.request.echo else ""
        self._num_prompt_tokens, self._num_tokens = num_prompt_tokens, 0
        # Whether all chunks but the first and the last have the same fields after the text or the
        # parsed delta.
        self._has_constant_end = (
            head.request.num_logprobs is None
            and not head.request.continuous_usage
            and not head.request.return_token_ids
            and not head.request.only_prompt
        )
        kind = "chat.completion.chunk" if head.request.chat else "text_completion"
        fields = json.dumps(head.fields(kind), separators=(",", ":"))
        content = '"delta":{"content":' if head.request.chat else '"text":'
        if parser is not None:
            # The fields of a parsed delta vary.
            content = '"delta":'
        start = f'data: {fields[:-1]},"choices":[{{"index":{index},{content}'
        # The first chunk of a chat has the role.
        self._start = start.replace('"delta":{', '"delta":{"role":"assistant",', 1)
        if head.request.return_token_ids:
            # The first chunk also has the prompt's token IDs; chats have them beside `choices`.
            ids = json.dumps(list(prompt.token_ids), separators=(",", ":"))
            before = '"choices":[' if head.request.chat else '"text":'
            self._start = self._start.replace(before, f'"prompt_token_ids":{ids},{before}', 1)
        self._next_start = start
        # With include_usage, the last chunk has the usage and the other chunks have null.
        with_usage = head.request.include_usage and not head.request.continuous_usage
        self._close = '],"usage":null}\n\n' if with_usage else "]}\n\n"
        self._closed = "}" if head.request.chat and parser is None else ""
        self._plain_end = f'{self._closed},"logprobs":null,"finish_reason":null}}'
        self._num_chars = 0

    def delta_renderer(self, record: Callable[[], None]) -> Callable[[Tokens], bytes] | None:
        """Like ChoiceRenderer.delta_renderer; None if chunks have different fields at their end."""
        if not self._has_constant_end:
            return None
        if self._parser is not None:

            def render_parsed(tokens: Tokens) -> bytes:
                record()
                return self.render(tokens, None)

            return render_parsed
        # Only the first and the last chunk have other parts around the quoted text.
        start, end = self._next_start, f"{self._plain_end}{self._close}"

        def render(tokens: Tokens) -> bytes:
            record()
            return f"{start}{quoted(tokens.text)}{end}".encode()

        return render

    def render(self, tokens: Tokens | None, finished: Finished | None) -> bytes:
        """Renders one event with tokens, the end, or both; b"" if there is nothing to send yet."""
        if self._request.only_prompt:
            tokens = None
        if self._parser is None:
            content = quoted(self._echo + (tokens.text if tokens is not None else ""))
            self._echo = ""
        elif not (content := self._parsed(self._parser, tokens, finished)):
            return b""
        start, self._start = self._start, self._next_start
        close = self._close
        if finished is None and self._has_constant_end:
            return f"{start}{content}{self._plain_end}{close}".encode()
        logprobs = _logprobs(self._request, tokens.logprobs, self._num_chars) if tokens else None
        if not self._request.chat and logprobs is not None:
            self._num_chars += sum(map(len, logprobs["tokens"]))
        rest: dict[str, Any] = {"logprobs": logprobs, "finish_reason": None}
        if finished is not None:
            rest |= finish_fields(self._request, finished, self._parser)
        if self._request.return_token_ids:
            rest["token_ids"] = tokens.token_ids if tokens is not None else ()
        end = json.dumps(rest, separators=(",", ":"))[1:]
        if self._request.continuous_usage:
            self._num_tokens += len(tokens.token_ids) if tokens is not None else 0
            close = self._with_usage(Usage(self._num_prompt_tokens, self._num_tokens, 0))
        return f"{start}{content}{self._closed},{end}{close}".encode()

    def _with_usage(self, so_far: Usage) -> str:
        """Renders the end of a chunk with token counts."""
        return f'],"usage":{json.dumps(usage(self._request, [so_far], [self._parser]))}}}\n\n'

    def _parsed(
        self, parser: ChoiceOutputParser, tokens: Tokens | None, finished: Finished | None
    ) -> str:
        """Renders the parsed delta as JSON; "" if there is nothing to send yet."""
        delta = parser.delta(tokens, finished=finished is not None)
        if delta is None and finished is None and self._has_constant_end:
            return ""
        content, self._first = {**self._first, **(delta or {})}, {}
        return json.dumps(content, separators=(",", ":"))


def usage_chunk(
    head: ResponseHead, usages: Sequence[Usage], parsers: Sequence[ChoiceOutputParser | None] = ()
) -> bytes:
    """Renders the last chunk of a stream with include_usage."""
    kind = "chat.completion.chunk" if head.request.chat else "text_completion"
    fields = {**head.fields(kind), "choices": [], "usage": usage(head.request, usages, parsers)}
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def usage(
    request: ParsedRequest,
    usages: Sequence[Usage],
    parsers: Sequence[ChoiceOutputParser | None] = (),
) -> dict[str, Any]:
    """Returns the token counts of all choices; a prompt with several choices counts once."""
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


def finish_fields(
    request: ParsedRequest, finished: Finished, parser: ChoiceOutputParser | None
) -> dict[str, Any]:
    """Returns why a choice has ended."""
    stop: str | int | None = finished.stop or None
    asked = request.options.get("stop") or ()
    if stop is not None and stop not in ([asked] if isinstance(asked, str) else asked):
        stop = int(stop)
    reason = _FINISH_REASONS.get(finished.reason, finished.reason)
    if parser is not None:
        reason = parser.finish_reason(reason)
    return {"finish_reason": reason, "stop_reason": stop}


def _prompt_details(
    request: ParsedRequest, finished: Finished, prompt: RenderedPrompt
) -> dict[str, Any]:
    """Returns the requested details of a prompt: logprobs and token IDs."""
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
    """Renders the logprobs of consecutive tokens; None if the request has no logprobs.

    Args:
        request: Gives the number of logprobs per token.
        positions: The candidates per position, chosen token first.
        num_chars: Number of characters before the first token.
        first_token: Text of a prompt's first token, which has no logprobs.
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
        # A prompt's position may have more entries. If two candidates have the same text, the
        # chosen token, or the more likely one, is kept.
        shown = position[: request.num_logprobs + 1]
        top = {one.text: _finite(one.logprob) for one in reversed(shown)}
        found["top_logprobs"].append(dict(reversed(top.items())) or None)
        found["text_offset"].append(num_chars)
        num_chars += len(text)
    return found


def _chat_position(position: Sequence[TokenLogprob], num_top: int) -> dict[str, Any]:
    # The chosen token may be listed twice: first, and at its rank.
    ranked = sorted({one.token_id: one for one in position}.values(), key=lambda one: one.rank)
    top = [_chat_token(one) for one in ranked if one.rank <= num_top]
    return {**_chat_token(position[0]), "top_logprobs": top}


def _chat_token(one: TokenLogprob) -> dict[str, Any]:
    encoded = list(one.text.encode("utf-8", errors="replace"))
    return {"token": one.text, "logprob": _finite(one.logprob), "bytes": encoded}


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
