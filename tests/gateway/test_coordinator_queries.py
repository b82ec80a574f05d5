"""Queries that any HTTP caller can make the gateway send to the coordinator."""

import asyncio
import hashlib

import pytest
from starlette.datastructures import Headers

from baton.gateway import coordinator_queries
from baton.gateway.coordinator_queries import (
    PerCallerQuery,
    QueryLimiter,
    caller_digest,
    caller_name,
    with_bearer,
)
from baton.gateway.error_responses import HttpError


async def test_callers_with_the_same_credential_wait_for_one_slot_together(monkeypatch):
    monkeypatch.setattr(coordinator_queries, "_QUEUE_TIMEOUT_S", 0.2)
    # The first error serves all callers, however slow the machine is.
    monkeypatch.setattr(coordinator_queries, "_ERROR_TTL_S", 60.0)
    waits = []

    class Limiter(QueryLimiter):
        async def run(self, fetch):
            waits.append(fetch)
            return await super().run(fetch)

    over, limiter = asyncio.Event(), Limiter()
    blocked = PerCallerQuery(lambda authorization: over.wait(), 60.0, limiter)
    known = PerCallerQuery(lambda authorization: asyncio.sleep(0, "answer"), 60.0, limiter)
    occupying = [asyncio.create_task(blocked.get(f"key {number}")) for number in range(32)]
    while len(waits) < len(occupying):
        await asyncio.sleep(0)
    waits.clear()
    responses = await asyncio.gather(
        *(known.get("ours") for _ in range(20)), return_exceptions=True
    )
    assert len(waits) == 1
    assert all(isinstance(one, HttpError) and one.status == 503 for one in responses)
    over.set()
    await asyncio.gather(*occupying)


def test_all_spellings_of_a_key_are_one_caller():
    # Stored files belong to this digest.
    stored = hashlib.sha256(b"Bearer K").digest()
    spellings = ["Bearer K", "bearer K", "BEARER  K", "Bearer K ", "K"]
    assert {caller_digest(one) for one in spellings} == {stored}
    assert {caller_name(one) for one in spellings} == {stored.hex()}
    others = ["", "Bearer k", "Bearer", "Basic K", "Bearer K L"]
    assert len({caller_digest(one) for one in ["Bearer K", *others]}) == 1 + len(others)
    assert caller_digest("") == hashlib.sha256(b"").digest()


@pytest.mark.parametrize("empty", [None, "", "Bearer", "Bearer ", "bearer  "])
def test_an_empty_authorization_does_not_hide_the_other_key(empty):
    shown = {} if empty is None else {"authorization": empty}
    found = with_bearer(Headers({**shown, "x-api-key": "key"}))
    assert found.getlist("authorization") == ["Bearer key"]


def test_authorization_has_priority():
    found = with_bearer(Headers({"authorization": "Bearer one", "x-api-key": "other"}))
    assert found["authorization"] == "Bearer one"
