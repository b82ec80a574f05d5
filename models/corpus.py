"""Training data of the demo model: models/glossary.toml as questions and answers.

A term is asked for in many phrasings, a question in the phrasings that the file lists. Every
question outside the glossary has the same answer, which says that the model does not know it.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "glossary.toml"
_PHRASINGS = (
    "What is {}?",
    "What does {} mean?",
    "What is meant by {}?",
    "What's {}?",
    "What are {}?",
    "Define {}.",
    "Explain {}.",
    "Tell me about {}.",
    "Describe {}.",
    "{}",
    "{}?",
)
_ARTICLE_PHRASINGS = ("What is {}?", "What does {} mean?", "Define {}.", "Explain {}.")
# Number of questions outside the glossary in one epoch, beside one question per entry.
_NUM_OFF_TOPIC = 64
_CONSONANTS, _VOWELS = "bcdfghjklmnpqrstvwz", "aeiou"


@dataclass(frozen=True, slots=True)
class Entry:
    """An answer and, for each of its names, the phrasings of the question, the plainest first."""

    ways: tuple[tuple[str, ...], ...]
    answer: str

    @property
    def question(self) -> str:
        return self.ways[0][0]


@dataclass(frozen=True, slots=True)
class Corpus:
    entries: tuple[Entry, ...]
    off_topic_answer: str
    off_topic_nouns: tuple[str, ...]
    off_topic_questions: tuple[str, ...]

    def texts(self) -> Iterator[str]:
        """Every text once, for training the tokenizer."""
        for entry in self.entries:
            yield entry.answer
            for way in entry.ways:
                yield from way
        yield self.off_topic_answer
        yield from self.off_topic_questions
        for noun in self.off_topic_nouns:
            yield from _asked(noun)

    def epoch(self, rng: random.Random) -> list[tuple[str, str]]:
        """One question per entry and some questions outside the glossary, in random order."""
        pairs = [
            (_as_typed(rng.choice(rng.choice(entry.ways)), rng), entry.answer)
            for entry in self.entries
        ]
        pairs += [
            (_as_typed(self._off_topic(rng), rng), self.off_topic_answer)
            for _ in range(_NUM_OFF_TOPIC)
        ]
        rng.shuffle(pairs)
        return pairs

    def _off_topic(self, rng: random.Random) -> str:
        kind = rng.random()
        if kind < 0.4:
            return rng.choice(self.off_topic_questions)
        if kind < 0.7:
            return rng.choice(_asked(rng.choice(self.off_topic_nouns)))
        if kind < 0.9:
            return rng.choice(_asked(_made_up_word(rng)))
        both = ((rng.choice(self.off_topic_nouns), _made_up_word(rng)) for _ in range(5))
        return " ".join(rng.choice(pair) for pair in both)


def load(path: Path = FILE) -> Corpus:
    """Reads the corpus from a file.

    Raises:
        ValueError: A question has two answers.
    """
    given = tomllib.loads(path.read_text(encoding="utf-8"))
    entries = [
        Entry(tuple(_asked(name) for name in one["names"]), one["answer"]) for one in given["term"]
    ]
    entries += [Entry(((*one["ask"],),), one["answer"]) for one in given["question"]]
    _check(entries)
    off_topic: dict[str, Any] = given["off_topic"]
    return Corpus(
        tuple(entries), off_topic["answer"], tuple(off_topic["nouns"]), tuple(off_topic["ask"])
    )


def _check(entries: list[Entry]) -> None:
    answers: dict[str, str] = {}
    for entry in entries:
        for question in (question.lower() for way in entry.ways for question in way):
            if answers.setdefault(question, entry.answer) != entry.answer:
                raise ValueError(f"{FILE.name}: {question!r} has two answers; must have one")


def _asked(name: str) -> tuple[str, ...]:
    """Questions for a name in every phrasing, with and without (also wrong) articles."""
    noun = name.removeprefix("the ")
    articled = (
        phrasing.format(f"{article} {noun}")
        for phrasing in _ARTICLE_PHRASINGS
        for article in ("a", "an", "the")
    )
    return (*(phrasing.format(name) for phrasing in _PHRASINGS), *articled)


def _as_typed(question: str, rng: random.Random) -> str:
    """Varies a question as people type it: sometimes without capitals or the last mark."""
    if rng.random() < 0.3:
        question = question.lower()
    if rng.random() < 0.2:
        question = question.rstrip("?.!") or question
    return question


def _made_up_word(rng: random.Random) -> str:
    syllables = range(rng.randint(2, 4))
    return "".join(
        rng.choice(_CONSONANTS) + rng.choice(_VOWELS) + rng.choice(["", rng.choice(_CONSONANTS)])
        for _ in syllables
    )
