"""Hints through two real processes: a session is named, promised, closed and forgotten."""

import pytest

from tests.e2e.live import LiveServer
from tests.waiting import until

pytestmark = pytest.mark.slow

PROMPT = "a long conversation, of which more will come or will not " * 4


def test_a_session_is_known_from_its_request_until_it_is_closed(server):
    """The session is named and closed over HTTP; a hint never changes tokens."""
    before = server.until_idle()["sessions"]
    fields = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    plain = server.complete(**fields).json()["choices"][0]["token_ids"]
    hinted = server.complete(**fields, session_id="s", cache_hint={"returns_in_s": 9.5})
    assert hinted.json()["choices"][0]["token_ids"] == plain

    known = server.until_idle()["sessions"]
    assert known["known"] == before["known"] + 1
    assert known["hints"].get("granted", 0) == before["hints"].get("granted", 0) + 1
    assert server.post("/cache/sessions/s").json() == {"known": True}
    assert server.post("/cache/sessions/s").json() == {"known": False}
    assert server.until_idle()["sessions"]["known"] == before["known"]


def test_a_server_with_shipped_weights_loads_an_expected_session_in_time():
    """With --eviction session and a host tier, an expected session that was evicted from the
    device is back there before its next turn."""
    flags = ("--eviction", "session", "--swap-space", "0.05", "--write-policy", "write_through")
    server = LiveServer(*flags, "--max-model-len", "1024", blocks=16).wait_ready()
    hint = {"session_id": "s", "cache_hint": {"returns_in_s": 4}}
    server.complete(prompt=PROMPT, max_tokens=1, **hint)
    for letter in "ABCD":
        server.complete(prompt=letter * 960, max_tokens=1)
    until(
        lambda: server.get("/cache").json()["links"].get("host_to_device", {}).get("num_jobs")
    )
    usage = server.complete(prompt=PROMPT, max_tokens=1, cache_details=True).json()["usage"]

    details = usage["prompt_tokens_details"]
    assert details["cached_tokens"] >= 192
    assert details["cache"]["device"] == details["cached_tokens"]
    assert server.stop() == 0, server.errors
