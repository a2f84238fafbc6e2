"""Hints through two real processes: a session is named, promised, closed and forgotten."""

import pytest

pytestmark = pytest.mark.slow

PROMPT = "a long conversation, of which more will come or will not " * 4


def test_a_session_is_known_from_its_request_until_it_is_closed(server):
    """Over the wire both ways; what is said of a session never changes its tokens."""
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
