"""Keeps finished responses of the Responses API for a while, in the memory of the gateway."""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any

from baton.gateway.coordinator_queries import caller_digest

# As long as a conversation usually pauses.
_EXPIRES_S = 3600.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A finished response.

    Attributes:
        id: ID of the response.
        root_id: ID of the first response of the conversation.
        messages: The conversation so far as chat messages, with this response's output and without
            the `instructions` of its requests.
        body: The response as JSON.
    """

    id: str
    root_id: str
    messages: list[dict[str, Any]]
    body: dict[str, Any]


class ResponseStore:
    """Responses by caller and ID.

    When their bytes exceed the limit, the oldest response of the caller with the most bytes goes:
    no caller's responses push out those of the others.

    Args:
        max_bytes: Limit of all responses together, as JSON; 0: nothing is stored.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._responses: OrderedDict[tuple[bytes, str], tuple[StoredResponse, int, float]]
        self._responses = OrderedDict()
        # The response of each output item, by caller and ID of the item.
        self._responses_by_item: dict[tuple[bytes, str], str] = {}
        # IDs of each caller, the oldest first, and the bytes of its responses.
        self._ids: dict[bytes, dict[str, None]] = {}
        self._num_bytes = Counter[bytes]()

    def __len__(self) -> int:
        return len(self._responses)

    def add(self, credential: str, response: StoredResponse) -> None:
        """Stores a response for the caller with this credential."""
        num_bytes = len(json.dumps(response.messages)) + len(json.dumps(response.body))
        if num_bytes > self.max_bytes:
            return
        key = _key(credential, response.id)
        self._remove(key)
        self._responses[key] = (response, num_bytes, time.monotonic() + _EXPIRES_S)
        self._ids.setdefault(key[0], {})[response.id] = None
        self._num_bytes[key[0]] += num_bytes
        for item in response.body["output"]:
            self._responses_by_item[_key(credential, item["id"])] = response.id
        while self._responses and self._is_expired(oldest := next(iter(self._responses))):
            self._remove(oldest)
        while self._num_bytes.total() > self.max_bytes:
            caller = max(self._num_bytes, key=self._num_bytes.__getitem__)
            self._remove((caller, next(iter(self._ids[caller]))))

    def find(self, credential: str, response_id: str) -> StoredResponse | None:
        """Returns a response that the same caller has stored; None if there is none."""
        key = _key(credential, response_id)
        if key in self._responses and self._is_expired(key):
            self._remove(key)
        found = self._responses.get(key)
        return found[0] if found is not None else None

    def find_item(self, credential: str, item_id: str) -> dict[str, Any] | None:
        """Returns an output item of a response that the same caller has stored; None: not there."""
        response_id = self._responses_by_item.get(_key(credential, item_id))
        found = self.find(credential, response_id) if response_id is not None else None
        items = found.body["output"] if found is not None else ()
        return next((item for item in items if item["id"] == item_id), None)

    def delete(self, credential: str, response_id: str) -> bool:
        """Deletes a response; returns whether there was one."""
        there = self.find(credential, response_id) is not None
        self._remove(_key(credential, response_id))
        return there

    def _is_expired(self, key: tuple[bytes, str]) -> bool:
        return self._responses[key][2] <= time.monotonic()

    def _remove(self, key: tuple[bytes, str]) -> None:
        removed = self._responses.pop(key, None)
        if removed is None:
            return
        response, num_bytes, _ = removed
        caller, response_id = key
        del self._ids[caller][response_id]
        self._num_bytes[caller] -= num_bytes
        if not self._ids[caller]:
            del self._ids[caller], self._num_bytes[caller]
        for item in response.body["output"]:
            self._responses_by_item.pop((caller, item["id"]), None)


def _key(credential: str, response_id: str) -> tuple[bytes, str]:
    return caller_digest(credential), response_id
