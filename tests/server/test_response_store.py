"""Stored responses: bounded in number, bytes and time, and apart for each tenant."""

from headwater.server.response_store import ResponseStore, StoredResponse
from headwater.server.responses_schema import ResponsesAnswer


def entry(name: str, *, num_bytes: int = 10, salt: str = "") -> StoredResponse:
    answer = ResponsesAnswer(
        id=f"resp_{name}", created_at=0, model="m", status="completed", output=[]
    )
    return StoredResponse(
        answer=answer, messages=(), session_id="", cache_salt=salt, num_bytes=num_bytes
    )


def make(**limits) -> ResponseStore:
    return ResponseStore(**{"max_responses": 3, "max_bytes": 100, "lifetime_s": 10.0, **limits})


def test_the_oldest_make_room():
    """Neither the number nor the bytes ever pass their bound."""
    store = make()
    for number in range(20):
        store.put(entry(str(number), num_bytes=7 * number), now=0.0)
        assert len(store) <= 3
        assert store.num_bytes <= 100
    assert store.get("resp_14", "", now=0.0) is not None
    assert store.get("resp_15", "", now=0.0) is None, "too large to be kept"
    assert store.get("resp_1", "", now=0.0) is None


def test_their_time_is_limited():
    """Afterwards they are gone, and so are their bytes."""
    store = make()
    store.put(entry("a"), now=0.0)
    store.put(entry("b"), now=5.0)
    assert store.get("resp_a", "", now=9.9) is not None
    assert store.get("resp_a", "", now=10.0) is None
    assert (len(store), store.num_bytes) == (1, 10)


def test_another_tenant_finds_nothing():
    """A response is its salt's alone."""
    store = make()
    store.put(entry("a", salt="red"), now=0.0)
    assert store.get("resp_a", "", now=0.0) is None
    assert store.get("resp_a", "blue", now=0.0) is None
    assert store.get("resp_a", "red", now=0.0) is not None


def test_one_can_be_removed_and_replaced():
    """The bytes follow; what is unknown is ignored; 0 keeps nothing."""
    store = make()
    store.put(entry("a"), now=0.0)
    store.put(entry("a", num_bytes=20), now=0.0)
    assert (len(store), store.num_bytes) == (1, 20)
    store.remove("resp_a")
    store.remove("resp_a")
    assert (len(store), store.num_bytes) == (0, 0)
    off = make(max_responses=0)
    off.put(entry("a"), now=0.0)
    assert len(off) == 0
