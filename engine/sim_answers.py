"""Written answers of the simulated engine, so that a program with tools can be tried without a GPU.

A tool call is text in the format of the model's tool-call parser. The answer depends only on the
prompt: every worker gives the same one, and a request that was handed over or recovered goes on
with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.sim_tokens import Vocabulary
from baton.runtime.config import SimulatedAnswer


class WrittenAnswers:
    """Finds the written answer to a prompt.

    Args:
        vocabulary: Vocabulary of the model.
        answers: Texts and the answers after them.

    Raises:
        ValueError: The tokenizer cannot represent an answer.
    """

    def __init__(self, vocabulary: Vocabulary, answers: Sequence[SimulatedAnswer]) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._answers = [(one.after, self._encoded(one.answer)) for one in answers]

    def find(self, prompt: Sequence[int]) -> Sequence[int]:
        """Returns the answer's token IDs, or none: of all `after` texts, the last one decides."""
        if not self._answers:
            return ()
        text = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
        at, tokens = max(
            ((text.rfind(after), tokens) for after, tokens in self._answers),
            key=lambda found: found[0],
        )
        return tokens if at >= 0 else ()

    def _encoded(self, answer: str) -> tuple[int, ...]:
        tokens = self._tokenizer.encode(answer, add_special_tokens=False).ids
        if self._tokenizer.decode(tokens, skip_special_tokens=False) != answer:
            raise ValueError(f"simulated.answers: the tokenizer cannot represent {answer[:80]!r}")
        return tuple(tokens)
