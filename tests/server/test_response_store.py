"""Stored responses: bounded in number, bytes and time, and separate for each tenant."""

from headwater.server.response_store import ResponseStore, StoredResponse
from headwater.server.schema import Message


def put(store: ResponseStore, name: str, *, num_bytes: int = 10, salt: str = "", now=0.0):
    store.put(f"resp_{name}", salt, bytes(num_bytes), now=now)


def make(**limits) -> ResponseStore:
    return ResponseStore(**{"max_responses": 3, "max_bytes": 100, "lifetime_s": 10.0, **limits})


def test_the_oldest_responses_are_removed_first():
    """Neither the number nor the bytes ever exceed their bound."""
    store = make()
    for number in range(20):
        put(store, str(number), num_bytes=7 * number)
        assert len(store) <= 3
        assert store.num_bytes <= 100
    assert store.get("resp_14", "", now=0.0) is not None
    assert store.get("resp_15", "", now=0.0) is None, "too large to be kept"
    assert store.get("resp_1", "", now=0.0) is None


def test_stored_responses_expire():
    """Expired responses are removed with their bytes."""
    store = make()
    put(store, "a")
    put(store, "b", now=5.0)
    assert store.get("resp_a", "", now=9.9) is not None
    assert store.get("resp_a", "", now=10.0) is None
    assert (len(store), store.num_bytes) == (1, 10)


def test_another_tenant_finds_nothing():
    """A response belongs to its salt."""
    store = make()
    put(store, "a", salt="red")
    assert store.get("resp_a", "", now=0.0) is None
    assert store.get("resp_a", "blue", now=0.0) is None
    assert store.get("resp_a", "red", now=0.0) is not None


def test_a_stored_response_can_be_removed_and_replaced():
    """The count of bytes is correct after replacing and after removing; removing an unknown id
    does nothing."""
    store = make()
    put(store, "a")
    put(store, "a", num_bytes=20)
    assert (len(store), store.num_bytes) == (1, 20)
    store.remove("resp_a")
    store.remove("resp_a")
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_store_of_no_responses_keeps_nothing():
    """With a limit of 0, storing is turned off."""
    off = make(max_responses=0)
    put(off, "a")
    assert len(off) == 0


def test_a_stored_response_is_the_same_after_it_was_encoded():
    """Workers send stored responses as bytes."""
    entry = StoredResponse(
        answer=b'{"id": "resp_a"}',
        messages=(Message(role="user", content="hello"),),
        session_id="s",
    )
    assert StoredResponse.decode(entry.encode()) == entry
