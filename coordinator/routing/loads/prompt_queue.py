"""The prompts that are assigned to one worker, and how much of each is computed by prediction.

A worker reports only first tokens, so the progress of a prompt is predicted. All work is in seconds
on a worker without decodes.

- A worker with prompts works all the time. `advance` gives the work of the time that has passed to
  the prompts in the order in which a worker computes them (runtime/steps/step_budget.py):
  interactive prompts first, then those that can be in time, then those with the least work left.
- A prompt whose first token came is computed. The prompts that arrived before it keep their
  progress: it has overtaken them. Those that arrived after it count as not begun: if they had gone
  first, they would be computed too. This also corrects the prediction if the prompt took longer
  than predicted.
- A prompt that is dropped (its request was cancelled or lost its worker) takes only its remaining
  work away. A prompt that arrived after it and should be computed by prediction, but has no first
  token, was not reached, and counts as not begun.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from baton.coordinator.state.requests import RequestKey

# A prompt with less work left than this, in seconds, counts as computed by prediction.
_DONE_S = 1e-9


@dataclass(slots=True, eq=False)
class QueuedPrompt:
    """A prompt assigned to a worker.

    Attributes:
        work_s: predicted seconds of its computation on an idle worker.
        num_tokens: tokens to compute.
        due_at: when its first token is due, by the core's clock.
        is_batch: whether it is the prompt of a batch request.
        left_s: the part of `work_s` that is left, by prediction, at the latest change of the queue.
        number: number of the prompt in the order of arrival.
    """

    work_s: float
    num_tokens: int
    due_at: float
    is_batch: bool
    left_s: float = field(init=False)
    number: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.left_s = self.work_s

    def goes_before(self, num_tokens: int, now: float, *, is_batch: bool) -> bool:
        """Whether a worker computes it before a new prompt (runtime/steps/step_budget.py).

        Args:
            num_tokens: tokens of the new prompt to compute.
            now: time by the core's clock.
            is_batch: whether the new prompt is of a batch request.
        """
        if self.is_batch != is_batch:
            return is_batch
        return self.num_tokens <= num_tokens and self.due_at >= now


@dataclass(slots=True, eq=False)
class PromptQueue:
    """Owns the prompts of one worker. The caller calls `advance` before each change.

    Attributes:
        left_s: predicted work of all prompts that is left, at the latest change.
        num_tokens: tokens of all prompts, including those that are computed by prediction.
    """

    left_s: float = 0.0
    num_tokens: int = 0
    # In order of arrival. This is an OrderedDict, because finding the first key of a dict takes
    # O(n) after its first keys were deleted.
    _prompts: OrderedDict[RequestKey, QueuedPrompt] = field(default_factory=OrderedDict)
    # Prompts with progress; few, so that ends cost little in a long queue.
    _begun: dict[int, QueuedPrompt] = field(default_factory=dict)
    _num_added: int = 0
    _advanced_at: float = 0.0

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, request: object) -> bool:
        return request in self._prompts

    def __iter__(self) -> Iterator[QueuedPrompt]:
        """Yields the prompts in the order of arrival."""
        return iter(self._prompts.values())

    def items(self) -> Iterable[tuple[str, QueuedPrompt]]:
        """Returns the prompts by name, in the order of arrival."""
        return self._prompts.items()

    @property
    def first(self) -> QueuedPrompt | None:
        """The prompt that arrived first; None: there is no prompt."""
        return next(iter(self._prompts.values()), None)

    def interactive_left_s(self, now: float, speed: float) -> float:
        """Returns the predicted work of prompts other than batch ones that is left; see `advance`.

        A worker computes them first.
        """
        left_s = sum(one.left_s for one in self if not one.is_batch)
        return max(0.0, left_s - (now - self._advanced_at) * speed)

    def advance(self, now: float, speed: float) -> None:
        """Gives the work since the latest change to the prompts.

        Args:
            now: time by the core's clock.
            speed: speed of prompts since the latest change, as a share of that of an idle worker.
        """
        since, self._advanced_at = self._advanced_at, now
        done_s = min((now - since) * speed, self.left_s)
        if done_s <= 0:
            return
        self.left_s -= done_s
        ordered: Iterable[QueuedPrompt] = self._prompts.values()
        if len(self._prompts) > 1:
            ordered = sorted(
                ordered, key=lambda one: (one.is_batch, one.due_at < since, one.left_s, one.number)
            )
        for prompt in ordered:
            part_s = min(prompt.left_s, done_s)
            if part_s > 0:
                prompt.left_s -= part_s
                done_s -= part_s
                self._begun[prompt.number] = prompt
            if done_s <= 0:
                break

    def add(self, request: RequestKey, prompt: QueuedPrompt) -> None:
        """Adds a prompt that no work has been done of."""
        assert request not in self._prompts
        self._num_added += 1
        prompt.number = self._num_added
        self._prompts[request] = prompt
        self.left_s += prompt.left_s
        self.num_tokens += prompt.num_tokens

    def end(self, request: RequestKey, *, is_computed: bool) -> QueuedPrompt:
        """Removes and returns a prompt.

        Args:
            request: the prompt's request in `add`.
            is_computed: whether its first token came; False: it will never come.
        """
        ended = self._prompts.pop(request)
        self.num_tokens -= ended.num_tokens
        self._begun.pop(ended.number, None)
        for prompt in list(self._begun.values()):
            if prompt.number > ended.number and (is_computed or prompt.left_s < _DONE_S):
                prompt.left_s = prompt.work_s
                del self._begun[prompt.number]
        # A running sum would keep rounding errors.
        self.left_s = sum(one.left_s for one in self)
        return ended

    def check_integrity(self) -> None:
        """Raises AssertionError when a sum differs from its parts."""
        prompts = self._prompts.values()
        assert self.num_tokens == sum(one.num_tokens for one in prompts)
        assert abs(self.left_s - sum(one.left_s for one in prompts)) < 1e-6
        assert {one.number for one in prompts if one.left_s < one.work_s} <= self._begun.keys()
