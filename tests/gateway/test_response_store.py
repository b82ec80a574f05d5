"""The memory of finished responses is bounded, and each belongs to its caller."""

from baton.gateway import response_store
from baton.gateway.response_store import ResponseStore, StoredResponse


def response(name, text="x"):
    body = {"id": name, "output": [{"id": f"item of {name}"}]}
    return StoredResponse(name, name, [{"role": "user", "content": text}], body)


def test_the_oldest_responses_go_when_the_bytes_are_used_up():
    store = ResponseStore(1000)
    for number in range(100):
        store.add("me", response(f"r{number}"))
    assert store.find("me", "r99") is not None
    assert store.find("me", "r0") is None
    assert 1 < len(store) < 25
    store.add("me", response("large", "x" * 2000))
    assert store.find("me", "large") is None
    assert store.find("you", "r99") is None
    assert store.delete("me", "r99")
    assert not store.delete("me", "r99")


def test_a_caller_does_not_push_out_the_responses_of_another():
    store = ResponseStore(1000)
    store.add("you", response("a"))
    for number in range(100):
        store.add("me", response(f"r{number}"))
    assert store.find("you", "a") is not None
    assert store.find("me", "r99") is not None
    assert 1 < len(store) < 25


def test_items_are_found_by_their_caller_as_long_as_their_response():
    store = ResponseStore(1000)
    store.add("me", response("a"))
    store.add("you", response("a", "y"))
    assert store.find_item("me", "item of a") == {"id": "item of a"}
    assert store.find_item("me", "item of b") is None
    assert store.find_item("them", "item of a") is None
    store.delete("me", "a")
    assert store.find_item("me", "item of a") is None
    assert store.find_item("you", "item of a") is not None


def test_without_memory_nothing_is_stored():
    store = ResponseStore(0)
    store.add("me", response("r"))
    assert len(store) == 0


def test_responses_expire(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(response_store.time, "monotonic", lambda: now[0])
    store = ResponseStore(10_000)
    store.add("me", response("old"))
    now[0] = 3601.0
    assert store.find("me", "old") is None
    store.add("me", response("a"))
    now[0] = 9000.0
    store.add("me", response("b"))
    assert len(store) == 1
