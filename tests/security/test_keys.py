"""API keys: scopes, limits, reload, separate tenants."""

import asyncio
import hashlib
import json
import os

import pytest

from headwater.clock import VirtualClock
from headwater.errors import ConfigError
from headwater.server.fair_share import FairShare
from headwater.server.keys import KeyRing
from tests.router.harness import run as run_router
from tests.server.harness import error, events, run

ALICE, BOB, ROOT, SCRAPER = (
    f"key-of-{name}-0123456789" for name in ("alice", "bob", "root", "x")
)


def write(path, *keys):
    path.write_text(json.dumps({"keys": list(keys)}))
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def keys_file(tmp_path):
    return write(
        tmp_path / "keys.json",
        {"name": "alice", "key": ALICE, "cache_salt": "salt-of-alice"},
        {"name": "bob", "key_sha256": hashlib.sha256(BOB.encode()).hexdigest()},
        {"name": "root", "key": ROOT, "scopes": ["admin"]},
        {"name": "prometheus", "key": SCRAPER, "scopes": ["metrics"]},
    )


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_a_scope_opens_its_endpoints_and_no_others(keys_file):
    """The scope client generates, metrics scrapes, and admin does everything."""
    paths = [
        ("POST", "/v1/completions", "client"),
        ("GET", "/v1/models", "client"),
        ("GET", "/metrics", "metrics"),
        ("GET", "/server_info", "admin"),
        ("GET", "/cache/tree", "admin"),
        ("POST", "/v1/pause", "admin"),
        ("POST", "/v1/resume", "admin"),
        ("POST", "/reset_prefix_cache", "admin"),
    ]

    async def scenario(harness):
        for method, path, scope in paths:
            body = {"prompt": "x"} if path == "/v1/completions" else None
            for key, own in ((ALICE, "client"), (SCRAPER, "metrics"), (ROOT, "admin")):
                answer = await harness.client.request(
                    method, path, json=body, headers=bearer(key)
                )
                expected = 200 if own in (scope, "admin") else 403
                assert answer.status_code == expected, (path, own, answer.text)
            nothing = await harness.client.request(method, path, json=body)
            assert error(nothing, 401)["code"] == "invalid_api_key"

    run(scenario, api_keys_file=keys_file)


def test_tenants_share_no_prefixes(keys_file):
    """A key's default salt separates its cache; a request may still name its own."""

    async def scenario(harness):
        async def cached(key, **fields):
            body = {"prompt": "one prompt for all " * 8, "max_tokens": 1} | fields
            answer = await harness.client.post(
                "/v1/completions", json=body, headers=bearer(key)
            )
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await cached(ALICE) == 0
        assert await cached(ALICE) > 0
        assert await cached(BOB) == 0
        assert await cached(BOB) > 0
        assert await cached(ALICE, cache_salt="another") == 0

    run(scenario, api_keys_file=keys_file)


def test_requests_of_other_tenants_are_the_admins_business(keys_file):
    """/stats shows a client its own requests, and a client can abort only its own."""

    async def scenario(harness):
        harness.engine.hold()
        post = harness.client.post
        running = [
            asyncio.create_task(
                post(
                    "/v1/completions",
                    json={"prompt": "hello", "request_id": f"of-{name}"},
                    headers=bearer(key),
                )
            )
            for name, key in (("alice", ALICE), ("bob", BOB))
        ]
        await harness.until_live(2)
        live = harness.service.live
        assert live.sequences_of_owner("alice") == set(live.sequences_of("of-alice"))

        body = {"request_ids": ["of-bob"]}
        aborted = await post("/v1/abort_requests", json=body, headers=bearer(ALICE))
        assert aborted.json() == {"aborted": 0}
        aborted = await post(
            "/v1/abort_requests", json={"abort_all": True}, headers=bearer(ALICE)
        )
        assert aborted.json() == {"aborted": 1}
        harness.engine.flow()
        assert (await running[1]).status_code == 200
        assert (await running[0]).status_code == 499

        for key, names in ((ALICE, {"of-alice"}), (ROOT, {"of-alice", "of-bob"})):
            stats = (await harness.client.get("/stats", headers=bearer(key))).json()
            found = {entry["request_id"].rsplit("-", 2)[0] for entry in stats["recent"]}
            assert found == names

    run(scenario, api_keys_file=keys_file)


def test_a_key_over_its_limits_gets_a_429(tmp_path):
    """Rate and concurrency are limited, each with Retry-After; other keys are not affected."""
    path = write(
        tmp_path / "keys.json",
        {"name": "slow", "key": ALICE, "requests_per_minute": 2},
        {"name": "narrow", "key": BOB, "max_concurrency": 1},
    )

    async def scenario(harness):
        async def ask(key):
            return await harness.client.post(
                "/v1/completions", json={"prompt": "x"}, headers=bearer(key)
            )

        assert [(await ask(ALICE)).status_code for _ in range(3)] == [200, 200, 429]
        refused = await ask(ALICE)
        assert error(refused, 429)["code"] == "rate_limit"
        assert 1 <= int(refused.headers["retry-after"]) <= 30

        harness.engine.hold()
        first = asyncio.create_task(ask(BOB))
        await harness.until_live(1)
        refused = await ask(BOB)
        assert error(refused, 429)["code"] == "concurrency_limit"
        assert "retry-after" in refused.headers
        harness.engine.flow()
        assert (await first).status_code == 200
        assert (await ask(BOB)).status_code == 200

    run(scenario, api_keys_file=path)


@pytest.mark.parametrize("wanted", [False, True])
def test_metrics_name_keys_only_when_asked(keys_file, wanted):
    """Names of tenants are not shown to every scraper."""

    async def scenario(harness):
        body = {"prompt": "hello", "max_tokens": 2}
        await harness.client.post("/v1/completions", json=body, headers=bearer(ALICE))
        scraped = (await harness.client.get("/metrics", headers=bearer(SCRAPER))).text
        assert ('sequences_by_key_total{key="alice"} 1' in scraped) is wanted

    run(scenario, api_keys_file=keys_file, key_metrics=wanted)


def test_the_file_is_read_again_when_it_changes(tmp_path):
    """No restart is needed; a file that cannot be read keeps the keys from before."""
    path, clock = tmp_path / "keys.json", VirtualClock()
    ring = KeyRing(None, write(path, {"name": "a", "key": ALICE}), clock)

    def later():
        clock.advance(2.0)
        os.utime(path, ns=(0, round(clock.now() * 1e9)))
        return [ring.find(key.encode()) is not None for key in (ALICE, BOB)]

    assert later() == [True, False]
    write(path, {"name": "b", "key": BOB})
    assert later() == [False, True]
    path.write_text("{")
    assert later() == [False, True]
    path.unlink()
    clock.advance(2.0)
    assert ring.find(BOB.encode()) is not None
    write(path, {"name": "a", "key": ALICE})
    ring.reload()
    assert ring.find(ALICE.encode()) is not None


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([], "Expected `array` of length >= 1"),
        ([{"name": "a"}], "needs either key or key_sha256"),
        ([{"name": "a", "key": ALICE}, {"name": "a", "key": BOB}], "used twice"),
        ([{"name": "a", "key": "short"}], "length >= 16"),
        ([{"name": "a", "key": ALICE, "scope": "admin"}], "unknown field `scope`"),
        ([{"name": "a b", "key": ALICE}], "matching regex"),
    ],
)
def test_an_invalid_file_is_refused_at_start(tmp_path, keys, words):
    """The message names the file and what is wrong with it."""
    with pytest.raises(ConfigError, match=words):
        KeyRing(None, write(tmp_path / "keys.json", *keys), VirtualClock())


def test_a_file_that_others_can_change_is_refused(tmp_path):
    """A user who can write the file could add a key."""
    path = write(tmp_path / "keys.json", {"name": "a", "key": ALICE})
    os.chmod(path, 0o666)
    with pytest.raises(ConfigError, match="chmod go-w"):
        KeyRing(None, path, VirtualClock())


def test_one_key_does_not_starve_another():
    """With a thousand waiting requests of one key, the first of another is next."""

    async def scenario():
        share, order = FairShare(4), []

        async def ask(key, weight=1.0):
            async with share.enter(key, weight, 1):
                order.append(key)
                await asyncio.sleep(0)

        many = [asyncio.create_task(ask("many")) for _ in range(1000)]
        await asyncio.sleep(0)
        few = asyncio.create_task(ask("few"))
        await few
        assert order.index("few") <= 8
        await asyncio.gather(*many)
        assert share.num_waiting == 0
        assert not share._running
        assert not share._shares

    asyncio.run(scenario())


def test_a_cancelled_request_is_never_granted_a_place():
    """Requests are cancelled in the turn in which a place becomes free; others still enter."""

    async def scenario():
        share = FairShare(1)

        async def ask():
            async with share.enter("many", 1.0, 1):
                await asyncio.sleep(3600)

        tasks = [asyncio.create_task(ask()) for _ in range(4)]
        await asyncio.sleep(0)
        for task in tasks[:3]:  # the first runs, the others wait
            task.cancel()
        results = await asyncio.gather(*tasks[:3], return_exceptions=True)
        assert [type(result) for result in results] == 3 * [asyncio.CancelledError]
        assert share._running == {"many": 1}
        tasks[3].cancel()
        await asyncio.gather(tasks[3], return_exceptions=True)
        assert not share._running
        assert not share.num_waiting

    asyncio.run(scenario())


def test_shares_are_proportions():
    """A key with three times the share has three times as many sequences in the engine."""

    async def scenario():
        share, running, most = FairShare(8), [], {"big": 0, "small": 0}

        async def ask(key, weight):
            async with share.enter(key, weight, 1):
                running.append(key)
                await asyncio.sleep(0.001)
                if share.num_waiting > 10:
                    for name in most:
                        most[name] = max(most[name], running.count(name))
                running.remove(key)

        tasks = [ask("big", 3.0) for _ in range(60)] + [ask("small", 1.0) for _ in range(60)]
        await asyncio.gather(*tasks)
        assert most["big"] >= 5

    asyncio.run(scenario())


def test_the_share_of_a_key_counts_for_its_requests(tmp_path):
    """Requests of two keys wait; of eight free places, the key with three times the share gets
    six."""
    path = write(
        tmp_path / "keys.json",
        {"name": "alice", "key": ALICE, "share": 3},
        {"name": "bob", "key": BOB},
    )

    async def scenario(harness):
        share = FairShare(8)
        harness.service.shared.enter_engine = share.enter
        harness.engine.hold()
        async with share.enter("others", 1.0, 8):
            asked = [
                asyncio.create_task(
                    harness.post("/v1/completions", {"prompt": "x"}, headers=bearer(key))
                )
                for key in (BOB, ALICE)
                for _ in range(12)
            ]
            await harness.until(lambda: share.num_waiting == 24)
        assert dict(share._running) == {"alice": 6, "bob": 2}
        harness.engine.flow()
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}

    run(scenario, api_keys_file=path)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("body", [{"request_ids": ["mine"]}, {"abort_all": True}])
def test_a_request_that_waits_for_the_engine_can_be_aborted(tmp_path, body, stream):
    """Such a request never reaches the engine; its client gets the same end as the client of a
    running request."""
    path = write(tmp_path / "keys.json", {"name": "alice", "key": ALICE})

    async def scenario(harness):
        share = FairShare(1)
        harness.service.shared.enter_engine = share.enter
        async with share.enter("others", 1.0, 1):
            fields = {"prompt": "x", "request_id": "mine", "n": 2, "stream": stream}
            waiting = asyncio.create_task(
                harness.post("/v1/completions", fields, headers=bearer(ALICE))
            )
            await harness.until(lambda: share.num_waiting == 1)
            aborted = await harness.post("/v1/abort_requests", body, headers=bearer(ALICE))
            assert aborted.json() == {"aborted": 2}
            answer = await waiting
            assert share.num_waiting == 0
        if stream:
            reasons = [event["choices"][0]["finish_reason"] for event in events(answer)]
            assert reasons == ["abort", "abort"]
        else:
            error(answer, 499)
        assert not share._running

    run(scenario, api_keys_file=path)


def test_a_stored_response_belongs_to_its_key(keys_file):
    """Another key can neither read, continue nor delete a stored response, whichever salt its
    request has."""

    async def scenario(harness):
        async def ask(key, **fields):
            body = {"input": "a secret", "max_output_tokens": 4} | fields
            return await harness.post("/v1/responses", body, headers=bearer(key))

        for owner, stranger, salts in (
            (ALICE, BOB, ("salt-of-alice", "key alice", "alice\nsalt-of-alice")),
            (BOB, ALICE, ("key bob", "bob", "bob\n", "\nbob")),
        ):
            name = (await ask(owner)).json()["id"]
            page = f"/v1/responses/{name}"
            for salt in ({}, *({"cache_salt": salt} for salt in salts)):
                for method in ("GET", "DELETE"):
                    answer = await harness.client.request(
                        method, page, params=salt, headers=bearer(stranger)
                    )
                    error(answer, 404)
                error(await ask(stranger, previous_response_id=name, **salt), 404)
            assert (await harness.client.get(page, headers=bearer(owner))).status_code == 200
            assert (await ask(owner, previous_response_id=name)).status_code == 200

    run(scenario, api_keys_file=keys_file)


def test_a_session_is_closed_in_the_cache_of_its_key(keys_file):
    """A key with a default salt closes its own session, and not one without a salt."""

    async def scenario(harness):
        async def close(key):
            answer = await harness.post("/cache/sessions/chat", headers=bearer(key))
            return answer.json()["known"]

        for key in (ALICE, BOB):
            body = {"prompt": "hello " * 20, "session_id": "chat", "max_tokens": 2}
            await harness.post("/v1/completions", body, headers=bearer(key))
        assert await close(ALICE)
        assert not await close(ALICE)
        assert await close(BOB)

    run(scenario, api_keys_file=keys_file)


def test_a_cancelled_request_leaves_the_queue():
    """A client that disconnects while it waits takes no place."""

    async def scenario():
        share = FairShare(1)
        async with share.enter("a", 1.0, 1):
            waiting = asyncio.create_task(share.enter("b", 1.0, 1).__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert share.num_waiting == 0
        async with asyncio.timeout(1), share.enter("c", 1.0, 1):
            pass

    asyncio.run(scenario())


def test_keys_are_checked_at_the_router(keys_file):
    """Instances get the caller from the router: scopes and salts hold through it."""

    async def scenario(harness):
        instance = harness.add()
        harness.client.headers.update(bearer(ROOT))
        await harness.ready(instance)
        body = {"prompt": "one prompt for all " * 8, "max_tokens": 1}

        async def cached(key):
            answer = await harness.client.post(
                "/v1/completions", json=body, headers=bearer(key)
            )
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [await cached(key) for key in (ALICE, ALICE, BOB, BOB)].count(0) == 2
        post = harness.client.post
        assert (
            await post("/v1/completions", json=body, headers=bearer("no"))
        ).status_code == 401
        assert (
            await harness.client.get("/instances", headers=bearer(ALICE))
        ).status_code == 403

    run_router(scenario, api_keys_file=keys_file)
