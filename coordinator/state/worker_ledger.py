"""Records the requests that the coordinator has sent to one worker, and the unanswered ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from baton.coordinator.state.requests import RequestKey


class WorkerLedger:
    """The coordinator's own record of one worker's requests, which is newer than its reports.

    A request is on a worker from `assign` to `release`. The handoff of a prefill worker may last
    longer: from `begin_handoff` to `end_handoff`. Only core/assignments.py changes a ledger.

    Attributes:
        num_tokens: sum of the tokens of the assigned requests.
        exclusive: the suspect request that runs without others here until the worker answers it;
            None: there is none.
    """

    __slots__ = (
        "_assigned",
        "_handoffs",
        "_local_prompts",
        "_unanswered",
        "exclusive",
        "num_tokens",
    )

    def __init__(self) -> None:
        self._assigned: dict[RequestKey, int] = {}
        # In the order in which the worker was told to begin.
        self._unanswered: dict[RequestKey, None] = {}
        # Those of the unanswered requests that have no prefill worker.
        self._local_prompts: dict[RequestKey, None] = {}
        self._handoffs: dict[RequestKey, None] = {}
        self.num_tokens = 0
        self.exclusive: RequestKey | None = None

    def __len__(self) -> int:
        """How many requests are assigned."""
        return len(self._assigned)

    def __iter__(self) -> Iterator[RequestKey]:
        """The assigned requests, in the order in which they were assigned."""
        return iter(tuple(self._assigned))

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._assigned

    def num_tokens_of(self, key: RequestKey) -> int:
        """Prompt and output tokens that an assigned request had when it was dispatched."""
        return self._assigned[key]

    @property
    def unanswered(self) -> Set[RequestKey]:
        """Requests that the worker was told to begin and has reported nothing of yet.

        They come in the order in which the worker was told.
        """
        return self._unanswered.keys()

    @property
    def local_prompt(self) -> RequestKey | None:
        """The first unanswered request whose prompt this decode worker computes itself."""
        return next(iter(self._local_prompts), None)

    @property
    def handoffs(self) -> Set[RequestKey]:
        """Requests whose KV cache is on its way from this worker to their decode worker."""
        return self._handoffs.keys()

    def computing(self, max_step_tokens: int) -> list[RequestKey]:
        """Unanswered requests that the engine may have been computing: as many as fit a step.

        Args:
            max_step_tokens: the most tokens that one engine step computes.
        """
        found, room = list[RequestKey](), max_step_tokens
        for key in self._unanswered:
            found.append(key)
            room -= self._assigned[key]
            if room <= 0:
                break
        return found

    # ---- Changes

    def assign(self, key: RequestKey, num_tokens: int) -> None:
        """Counts a request with this many prompt and known output tokens."""
        assert key not in self._assigned
        self._assigned[key] = num_tokens
        self.num_tokens += num_tokens

    def begin(self, key: RequestKey, *, computes_prompt: bool, exclusive: bool) -> None:
        """The worker is told to begin an assigned request.

        Args:
            key: the request.
            computes_prompt: whether a decode worker computes the prompt itself.
            exclusive: whether no other request may join until the worker has answered.
        """
        self._unanswered[key] = None
        if computes_prompt:
            self._local_prompts[key] = None
        if exclusive:
            self.exclusive = key

    def answer(self, key: RequestKey) -> None:
        """The worker has reported something of a request; idempotent."""
        self._unanswered.pop(key, None)
        self._local_prompts.pop(key, None)
        if self.exclusive == key:
            self.exclusive = None

    def begin_handoff(self, key: RequestKey) -> None:
        """This worker sends the request's KV cache from now on."""
        self._handoffs[key] = None

    def end_handoff(self, key: RequestKey) -> None:
        """The worker's side of the handoff is over; idempotent."""
        self._handoffs.pop(key, None)

    def release(self, key: RequestKey) -> bool:
        """Takes a request off the worker; returns whether it was assigned."""
        self.answer(key)
        num_tokens = self._assigned.pop(key, None)
        if num_tokens is None:
            return False
        self.num_tokens -= num_tokens
        return True

    def check_integrity(self, parts: Mapping[RequestKey, bool]) -> None:
        """Raises AssertionError when the ledger differs from the requests.

        Args:
            parts: the requests that name this worker as theirs, and for each whether this worker
                is its prefill worker.
        """
        assert self.num_tokens == sum(self._assigned.values())
        assert self._assigned.keys() <= parts.keys()
        assert self._unanswered.keys() <= self._assigned.keys()
        assert self._local_prompts.keys() <= self._unanswered.keys()
        assert self.exclusive is None or self.exclusive in self._unanswered
        assert all(parts.get(key, False) for key in self._handoffs)
