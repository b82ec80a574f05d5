"""Fair shares by tokens served: between tenants of a lane, between lanes, and a tenant's rate.

The order is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
(OSDI 2024).
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeAlias, TypeVar


class Account:
    """What one tenant was served in one lane.

    Attributes:
        weight: its share relative to others' weights; more than 0.
        counter: weighted tokens that it was served, divided by `weight`; lifted to the others'
            level when it joins them.
        floor: the level that it was lifted to last; a credit leads no lower.
        turn: number of its latest turn, as FairOrder counts them; 0: it has had none.
    """

    __slots__ = ("counter", "floor", "item", "turn", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.counter = self.floor = 0.0
        self.turn = 0
        # The one entry of FairOrder's heap that counts; None while it is not in the order.
        self.item: _Item[Account] | None = None


A = TypeVar("A", bound=Account)
# An entry: counter, turn, a number that tells equal ones apart, the account.
_Item: TypeAlias = "tuple[float, int, int, A]"


class FairOrder(Generic[A]):
    """Accounts that have something to run, the smallest counter first.

    Between equal counters the account goes first whose latest turn is longest ago; so a newcomer,
    who joins with the smallest counter there is, goes before everyone else.

    Counters change while their accounts are in the heap. An account whose counter grew is moved to
    its place when it surfaces, at most once per charge; one whose counter shrank is entered again
    at once. So every operation costs O(log n), amortised, and a charge costs an addition.
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
        """Whose turn it is; None when nobody has anything to run."""
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
        """The smallest counter; while nobody is there, that of the account that left last."""
        first = self.first() or self._last_left
        return first.counter if first is not None else 0.0

    def join(self, account: A) -> None:
        """An account has something to run from now on.

        It joins at the others' level at least: what it did not use before is not saved up for it.
        """
        assert account.item is None
        account.floor = self.level()
        account.counter = max(account.counter, account.floor)
        self._num_active += 1
        self._push(account)

    def leave(self, account: A) -> None:
        """An account has nothing to run any more."""
        assert account.item is not None
        account.item = None
        self._num_active -= 1
        self._last_left = account

    def charge(self, account: A, cost: float) -> None:
        """Adds weighted tokens to an account, whether or not it is in the order."""
        account.counter += cost / account.weight

    def credit(self, account: A, cost: float) -> None:
        """Takes weighted tokens back that were charged and turned out not to be served."""
        account.counter = max(account.floor, account.counter - cost / account.weight)
        if account.item is not None:
            self._push(account)

    def took_turn(self, account: A) -> None:
        """An account was served: among equals it is last from now on."""
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
        """Raises AssertionError when an account that joined is not there once."""
        live = [item for item in self._heap if item[3].item is item]
        assert len(live) == self._num_active
        assert all(item[3].floor <= item[3].counter for item in live)
        # No key is ahead of its counter: else the account would wait longer than it must.
        assert all(item[0] <= item[3].counter for item in live)


class Trickle:
    """What the lane that yields is owed: its share of the tokens of both, while both have work.

    A deficit count: its next request goes first once its cost is owed, so that the other lane is
    never held up by tokens that were not earned yet.

    Args:
        share: of all tokens, at least 0 and less than 1.

    Attributes:
        owed: weighted tokens; negative when it got more than its share.
    """

    __slots__ = ("owed", "per_token")

    def __init__(self, share: float) -> None:
        self.per_token = share / (1.0 - share)
        self.owed = 0.0

    def is_due(self, cost: float) -> bool:
        """Whether the lane is owed a request of so many weighted tokens."""
        return self.owed >= cost

    def got(self, cost: float) -> None:
        """The lane got tokens that nobody else could use: they pay what it is owed, and no more."""
        if self.owed > 0.0:
            self.owed = max(0.0, self.owed - cost)

    def lane_begins(self) -> None:
        """The lane has something to run again: what it was owed before is not saved up for it."""
        self.owed = min(self.owed, 0.0)


class TokenBucket:
    """A rate of tokens with bursts.

    What costs more than a whole burst is let through when the bucket is full, and leaves a debt.

    Args:
        tokens_per_s: rate at which it fills.
        burst_tokens: how many it holds; at the start it is full.
        now: seconds by the clock of every later call.
    """

    __slots__ = ("_at", "_burst", "_level", "_rate")

    def __init__(self, tokens_per_s: float, burst_tokens: float, now: float) -> None:
        self._rate, self._burst = tokens_per_s, burst_tokens
        self._level, self._at = burst_tokens, now

    def wait_s(self, num_tokens: int, now: float) -> float:
        """Seconds until it has enough; 0 when it has now.

        Less than half a token missing is enough: clocks and rates are rounded.
        """
        self._fill(now)
        missing = min(num_tokens, self._burst) - self._level
        return missing / self._rate if missing > 0.5 else 0.0

    def take(self, num_tokens: int, now: float) -> None:
        """Takes tokens out, whether or not the bucket has enough."""
        self._fill(now)
        self._level -= num_tokens

    def give_back(self, num_tokens: int, now: float) -> None:
        """Puts back what was taken and not used; negative: more was used than was taken."""
        self._fill(now)
        self._level = min(self._burst, self._level + num_tokens)

    def full(self, now: float) -> bool:
        self._fill(now)
        return self._level >= self._burst

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._level = min(self._burst, self._level + (now - self._at) * self._rate)
            self._at = now
