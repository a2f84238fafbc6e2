"""Hints over HTTP: they reach the cache, within limits."""

import pytest

from headwater.engine.client import GetStats
from headwater.metrics import names
from tests.server.harness import error, run
from tests.server.test_admin import samples

JSON = {"content-type": "application/json"}
PROMPT = "a conversation that goes on for a good while " * 4


async def sessions(harness):
    return (await harness.client.get("/cache")).json()["sessions"]


@pytest.mark.parametrize(
    ("hint", "outcome"),
    [("closed", "closed"), ("pending", "granted"), ({"returns_in_s": 30}, "granted")],
)
def test_a_hint_reaches_the_cache(hint, outcome):
    """A hint goes from the body through the engine to the cache, for completions and chat."""

    async def scenario(harness):
        fields = {"session_id": "s", "cache_hint": hint}
        assert (await harness.complete(prompt=PROMPT, **fields)).status_code == 200
        await harness.until_idle()
        found = await sessions(harness)
        assert found["hints"] == {outcome: 1}
        assert found["known"] == (0 if outcome == "closed" else 1)
        assert (found["promised_blocks"] > 0) == (outcome == "granted")
        messages = [{"role": "user", "content": PROMPT}]
        assert (await harness.chat(messages=messages, **fields)).status_code == 200
        await harness.until_idle()
        assert (await sessions(harness))["hints"] == {outcome: 2}
        shown = samples((await harness.client.get("/metrics")).text)
        assert shown[f"{names.PREFIX}:cache_hints_total", outcome] == 2

    run(scenario)


def test_a_session_is_closed_by_its_name():
    """The body is empty or has a salt; the id may contain a slash, and an unknown one is no
    error."""

    async def scenario(harness):
        name = "team/7%"
        await harness.complete(prompt=PROMPT, session_id=name)
        await harness.complete(prompt=PROMPT, session_id=name, cache_salt="tenant")
        await harness.until_idle()
        url = "/cache/sessions/team%2F7%25"
        assert (await harness.client.post(url)).json() == {"known": True}
        assert (await harness.client.post(url)).json() == {"known": False}
        assert (await harness.post(url, {"cache_salt": "other"})).json() == {"known": False}
        assert (await harness.post(url, {"cache_salt": "tenant"})).json() == {"known": True}
        assert (await sessions(harness))["known"] == 0

    run(scenario)


def test_the_blocks_of_a_closed_session_go_first():
    """Under an LRU, a session that was used last and then closed is evicted before an older
    one."""

    async def scenario(harness):
        for name in ("first", "second"):
            await harness.complete(prompt=name + PROMPT, session_id=name)
        await harness.until_idle()
        await harness.client.post("/cache/sessions/second")
        for filler in "ABCDEFGH":
            await harness.complete(prompt=filler * 160, max_tokens=1)
            if (await harness.engine.control(GetStats())).tiers["device"].evicted:
                break
        cached = [await cached_tokens(harness, name + PROMPT) for name in ("first", "second")]
        assert cached[0] == len("first" + PROMPT) // 16 * 16
        assert cached[1] < cached[0]

    run(scenario)


async def cached_tokens(harness, prompt):
    answer = await harness.complete(prompt=prompt, max_tokens=1)
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_hint": "closed"}, "cache_hint"),
        ({"session_id": "s", "cache_hint": "gone"}, "cache_hint"),
        ({"session_id": "s", "cache_hint": {"returns_in_s": -1}}, "cache_hint"),
        ({"session_id": "s", "cache_hint": {"returns_in_s": 3_601}}, "cache_hint"),
        ({"session_id": "s", "cache_hint": {"returns_in_s": "soon"}}, "cache_hint"),
        ({"session_id": "s", "cache_hint": {"closed": True}}, "cache_hint"),
        ({"session_id": "", "cache_hint": "closed"}, "session_id"),
        ({"session_id": "s" * 257}, "session_id"),
        ({"session_id": "two words"}, "session_id"),
        ({"session_id": 7}, "session_id"),
    ],
)
def test_an_invalid_hint_is_a_400(fields, param):
    """Lesson 68: hints are bounded and typed, and the answer names the field."""

    async def scenario(harness):
        assert error(await harness.complete(**fields), 400)["param"] == param

    run(scenario)


def test_closing_a_session_has_limits():
    """Lesson 68: a name that is too long and a wrong body are refused."""

    async def scenario(harness):
        error(await harness.client.post("/cache/sessions/" + "s" * 257), 400)
        error(await harness.client.post("/cache/sessions/two%20words"), 400)
        error(await harness.post("/cache/sessions/s", {"cache_salt": ""}), 400)
        error(await harness.client.post("/cache/sessions/s", content=b"{", headers=JSON), 400)
        harness.engine.die("gone")
        error(await harness.client.post("/cache/sessions/s"), 503)

    run(scenario)
