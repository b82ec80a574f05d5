"""Fair shares by served tokens: between tenants of a lane, between lanes, and rate limits.

Tenants are ordered by the virtual token counter of Sheng et al., "Fairness in Serving Large
Language Models" (OSDI 2024).
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeAlias, TypeVar


class Account:
    """Virtual token counter of one tenant in one lane.

    Attributes:
        weight: The tenant's share relative to other tenants' weights; more than 0.
        counter: Weighted tokens that the tenant was served, divided by `weight`. Raised to the
            level of the other accounts when the account joins the order.
        floor: Level that `counter` was raised to last. A credit does not reduce it further.
        turn: Number of its latest turn, as counted by FairOrder; 0: it has had no turn.
    """

    __slots__ = ("counter", "floor", "item", "turn", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.counter = self.floor = 0.0
        self.turn = 0
        # Its valid item in FairOrder's heap; None while the account is not in the order.
        self.item: _Item[Account] | None = None


A = TypeVar("A", bound=Account)
# Heap item: counter, turn, a unique number, the account.
_Item: TypeAlias = "tuple[float, int, int, A]"


class FairOrder(Generic[A]):
    """Accounts with a request to run, smallest counter first.

    Among equal counters, the account with the oldest turn goes first. A new account joins with the
    smallest counter and no turn, and therefore goes before all others.

    Counters change while their accounts are in the heap. An account with a larger counter is moved
    when it reaches the top, at most once per charge. An account with a smaller counter is pushed
    again at once, and its old item becomes invalid. Each operation costs O(log n) amortised; a
    charge costs one addition.
    """

    def __init__(self) -> None:
        self._heap: list[_Item[A]] = []
        self._num_active = 0
        self._num_pushed = 0
        self._num_turns = 0
        self._last_left: A | None = None

    def __len__(self) -> int:
        return self._num_active

    def first(self) -> A | None:
        """Returns the account whose turn it is; None if the order is empty."""
        heap = self._heap
        while heap:
            item = heap[0]
            account = item[3]
            if account.item is not item:
                heapq.heappop(heap)
            elif item[0] != account.counter or item[1] != account.turn:
                heapq.heapreplace(heap, self._item(account))
            else:
                return account
        return None

    def level(self) -> float:
        """Returns the smallest counter; in an empty order, that of the account that left last."""
        first = self.first() or self._last_left
        return first.counter if first is not None else 0.0

    def join(self, account: A) -> None:
        """Adds an account that has a request to run.

        Its counter is raised to the level of the others, so that unused shares do not accumulate.
        """
        assert account.item is None
        account.floor = self.level()
        account.counter = max(account.counter, account.floor)
        self._num_active += 1
        self._push(account)

    def leave(self, account: A) -> None:
        """Removes an account that has no request to run."""
        assert account.item is not None
        account.item = None
        self._num_active -= 1
        self._last_left = account

    def charge(self, account: A, cost: float) -> None:
        """Adds weighted tokens to an account, whether or not it is in the order."""
        account.counter += cost / account.weight

    def credit(self, account: A, cost: float) -> None:
        """Gives back weighted tokens that were charged but not served."""
        account.counter = max(account.floor, account.counter - cost / account.weight)
        if account.item is not None:
            self._push(account)

    def took_turn(self, account: A) -> None:
        """Notes that an account was served: among equal counters it is last now."""
        self._num_turns += 1
        account.turn = self._num_turns

    def _push(self, account: A) -> None:
        heapq.heappush(self._heap, self._item(account))
        if len(self._heap) > 64 + 2 * self._num_active:
            self._heap = [item for item in self._heap if item[3].item is item]
            heapq.heapify(self._heap)

    def _item(self, account: A) -> _Item[A]:
        self._num_pushed += 1
        item = (account.counter, account.turn, self._num_pushed, account)
        account.item = item
        return item

    def check_integrity(self) -> None:
        """Raises AssertionError when an account that joined is not in the order exactly once."""
        live = [item for item in self._heap if item[3].item is item]
        assert len(live) == self._num_active
        assert all(item[3].floor <= item[3].counter for item in live)
        # A key above its counter would make the account wait too long.
        assert all(item[0] <= item[3].counter for item in live)


class BatchDeficit:
    """Deficit counter of the batch lane: tokens that it is owed while both lanes have work.

    The next batch request goes first once its whole cost is owed. The interactive lane is therefore
    never delayed by batch tokens that are not owed yet.

    Args:
        share: The batch lane's share of all tokens, at least 0 and less than 1.

    Attributes:
        owed: Weighted tokens; negative if the lane got more than its share.
        per_token: Weighted tokens owed per weighted token of the interactive lane.
    """

    __slots__ = ("owed", "per_token")

    def __init__(self, share: float) -> None:
        self.per_token = share / (1.0 - share)
        self.owed = 0.0

    def is_due(self, cost: float) -> bool:
        """Whether the lane is owed a request of this cost in weighted tokens."""
        return self.owed >= cost

    def used_idle(self, cost: float) -> None:
        """The batch lane got tokens that the interactive lane could not use.

        They reduce what is owed to at least 0: they do not count against the later share.
        """
        if self.owed > 0.0:
            self.owed = max(0.0, self.owed - cost)

    def restart(self) -> None:
        """The batch lane has requests again: tokens that it did not use before are not owed."""
        self.owed = min(self.owed, 0.0)


class TokenBucket:
    """Token bucket: a rate limit with bursts.

    A request larger than the burst passes when the bucket is full, and makes the level negative.

    Args:
        tokens_per_s: Rate at which the bucket fills.
        burst_tokens: Capacity; the bucket starts full.
        now: Current time in seconds, by the clock of every later call.
    """

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, tokens_per_s: float, burst_tokens: float, now: float) -> None:
        self._rate, self._burst = tokens_per_s, burst_tokens
        self._level, self._at = burst_tokens, now

    def wait_s(self, num_tokens: int, now: float) -> float:
        """Returns the seconds until the bucket holds enough tokens; 0 if it does now.

        Up to half a token may be missing, because clocks and rates are rounded.
        """
        self._fill(now)
        missing = min(num_tokens, self._burst) - self._level
        return missing / self._rate if missing > 0.5 else 0.0

    def take(self, num_tokens: int, now: float) -> None:
        """Takes tokens out, even if the bucket does not hold enough."""
        self._fill(now)
        self._level -= num_tokens

    def give_back(self, num_tokens: int, now: float) -> None:
        """Returns unused tokens; a negative number takes the tokens used beyond those taken."""
        self._fill(now)
        self._level = min(self._burst, self._level + num_tokens)

    def full(self, now: float) -> bool:
        """Whether the bucket is full."""
        self._fill(now)
        return self._level >= self._burst

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now
