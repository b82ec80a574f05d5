"""Detokenizes the simulated engine's output, with vLLM's rules for stop strings.

The rules are those of vllm/v1/engine/detokenizer.py. A character that is split across tokens waits
for its last token. Until the output ends, the last characters are held back, one fewer than the
longest stop string has, unless stop strings are included in the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from baton.engine.sim_tokens import Vocabulary
from baton.v1 import common_pb2

# Number of prompt tokens at its end that decide how the first output tokens read.
_NUM_CONTEXT_TOKENS = 16


class OutputText:
    """The text of one request's output.

    Args:
        vocabulary: The vocabulary with the tokenizer.
        prompt: Token IDs before the output; the last ones decide how the first output token reads.
        sampling: Stop strings, and whether special tokens are skipped.
    """

    __slots__ = (
        "_held_back",
        "_include_stop",
        "_reported",
        "_skip_special",
        "_stop",
        "_stream",
        "_text",
        "_tokenizer",
    )

    def __init__(
        self, vocabulary: Vocabulary, prompt: Sequence[int], sampling: common_pb2.SamplingParams
    ) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._skip_special = (
            sampling.skip_special_tokens if sampling.HasField("skip_special_tokens") else True
        )
        context = list(prompt[-_NUM_CONTEXT_TOKENS:])
        if self._tokenizer.decode(context).endswith("\N{REPLACEMENT CHARACTER}"):
            # A decode stream that starts inside a character would return prompt text with its end.
            context = []
        self._stream: Any = DecodeStream(ids=context, skip_special_tokens=self._skip_special)
        self._stop = tuple(sampling.stop)
        self._include_stop = sampling.include_stop_str_in_output
        self._held_back = 0
        if self._stop and not self._include_stop:
            self._held_back = max(map(len, self._stop)) - 1
        self._text, self._reported = "", 0

    def replay(self, token_ids: Sequence[int], num_reported_chars: int) -> None:
        """Adds tokens that exist already, and the number of their characters that were sent."""
        for token_id in token_ids:
            self._text += self._decode(token_id)
        self._reported = num_reported_chars

    def add(self, token_id: int, *, may_stop: bool) -> str:
        """Adds a token; returns the stop string that it completed, or "".

        Args:
            token_id: The next token.
            may_stop: Whether stop strings count yet (min_tokens).
        """
        before = len(self._text)
        self._text += self._decode(token_id)
        num_new = len(self._text) - before
        if not may_stop or not num_new:
            return ""
        ends = [
            (at + len(stop), order, stop)
            for order, stop in enumerate(self._stop)
            if (at := self._text.find(stop, max(0, before + 1 - len(stop)))) >= 0
        ]
        if not ends:
            return ""
        end, _, stop = min(ends)
        self._text = self._text[: end if self._include_stop else end - len(stop)]
        return stop

    def take(self, *, finished: bool) -> str:
        """Returns the text that became final since the last call."""
        end = len(self._text) - (0 if finished else self._held_back)
        if end <= self._reported:
            return ""
        text, self._reported = self._text[self._reported : end], end
        return text

    def _decode(self, token_id: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # As vLLM recovers from bytes that are not UTF-8.
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            return self._stream.step(self._tokenizer, token_id) or ""
