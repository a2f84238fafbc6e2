"""Only processes with the peer token join, leave or speak for a cluster."""

import asyncio
import hashlib

import httpx
import pytest

from headwater.errors import ConfigError
from headwater.server.cluster_auth import SIGNATURE_HEADER, ClusterAuth, check_digest
from headwater.server.router.config import RouterConfig
from headwater.server.router.protocol import DIGEST_HEADER, TOKEN_HEADER
from headwater.server.router.registry import MAX_GROUPS
from tests.router.harness import TOKEN, run

JSON = {"content-type": "application/json"}
KEY = "client-key-0123456789"


def test_an_api_key_registers_nothing():
    """Neither a client's key nor a request without one adds a rogue instance or drains a real
    one."""

    async def scenario(harness):
        real = harness.add()
        harness.client.headers["authorization"] = f"Bearer {KEY}"
        await harness.ready(real)
        rogue = (await harness.known())[real.name] | {
            "instance_id": "rogue",
            "url": "http://127.0.0.1:1",
        }

        for headers in ({}, {"authorization": f"Bearer {KEY}"}, {TOKEN_HEADER: "guess"}):
            added = await harness.client.post("/instances", json=rogue, headers=headers)
            drained = await harness.client.delete(f"/instances/{real.name}", headers=headers)
            assert (added.status_code, drained.status_code) == (403, 403)

        assert list(await harness.known()) == [real.name]
        assert (await harness.known())[real.name]["state"] == "ready"
        assert (await harness.complete()).status_code == 200

    run(scenario, api_key=KEY)


def test_a_router_without_a_secret_does_not_start():
    """Lesson 80: the router does not start on loopback either; --insecure is the explicit
    exception."""
    with pytest.raises(ConfigError, match="HEADWATER_PEER_TOKEN"):
        RouterConfig()
    assert RouterConfig(is_insecure=True).peer_token is None


def test_the_secret_does_not_travel():
    """A sniffed registration shows neither the token nor anything that can be replayed."""

    async def scenario(harness):
        real = harness.add()
        await harness.ready(real)
        body = b"{}"
        auth = ClusterAuth(TOKEN, harness.unix_s)
        signed = auth.sign("POST", "/instances", JSON, body)
        assert TOKEN not in str(signed)

        post = harness.client.post
        first = await post("/instances", content=body, headers=signed)
        again = await post("/instances", content=body, headers=signed)
        other = auth.sign("POST", "/instances", JSON, body)
        forged = await post("/instances", content=b'{"a":1}', headers=other)
        elsewhere = await harness.client.delete("/instances/x", headers=other)

        assert first.status_code == 400  # accepted as ours; the registration is empty
        assert [again.status_code, forged.status_code, elsewhere.status_code] == [403] * 3

    run(scenario)


@pytest.mark.parametrize("age_s", [-3600.0, 3600.0])
def test_an_old_signature_is_worthless(age_s):
    """Signatures expire, so a recorded one cannot be used."""

    async def scenario(harness):
        auth = ClusterAuth(TOKEN, lambda: harness.unix_s() + age_s)
        headers = auth.sign("POST", "/instances", JSON, b"{}")
        answer = await harness.client.post("/instances", content=b"{}", headers=headers)
        assert answer.status_code == 403

    run(scenario)


def test_a_token_in_a_header_counts_on_loopback_and_over_tls_only():
    """Between hosts over plain HTTP the token would be readable."""
    auth = ClusterAuth(TOKEN, lambda: 1.0)
    scope = {"headers": [(TOKEN_HEADER.encode(), TOKEN.encode())], "scheme": "http"}

    assert auth.verify(scope | {"client": ("127.0.0.1", 1)})
    assert auth.verify(scope | {"client": ("10.0.0.9", 1), "scheme": "https"})
    assert not auth.verify(
        scope | {"client": ("10.0.0.9", 1), "method": "GET", "path": "/", "raw_path": b"/"}
    )


def scope_of(headers, path="/instances"):
    """A POST with these headers from another host."""
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    place = {"method": "POST", "path": path, "raw_path": path.encode()}
    return place | {"headers": raw, "scheme": "http", "client": ("10.0.0.9", 1)}


def test_nonces_are_bounded(monkeypatch):
    """A flood of valid signatures does not grow the router's memory without limit, and none of
    them is accepted again when its nonce was dropped."""
    monkeypatch.setattr("headwater.server.cluster_auth._MAX_NONCES", 100)
    now = [1000.0]
    auth = ClusterAuth(TOKEN, lambda: now[0])
    scopes = []
    for _ in range(150):
        scopes.append(scope_of(auth.sign("POST", "/instances", {}).items()))
        assert auth.verify(scopes[-1])
        now[0] += 0.5
    assert len(auth._nonces) == 100
    assert not any(auth.verify(scope) for scope in scopes)
    now[0] += 1000.0
    assert auth.verify(scope_of(auth.sign("POST", "/instances", {}).items()))
    assert len(auth._nonces) == 1


@pytest.mark.parametrize("name", [DIGEST_HEADER, SIGNATURE_HEADER, TOKEN_HEADER])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_signed_header_that_is_sent_twice_is_no_signature(name, is_first):
    """The header that is checked must be the one that is used; otherwise another body would
    pass."""
    auth = ClusterAuth(TOKEN, lambda: 1000.0)
    signed = list(auth.sign("POST", "/instances", {}, b"{}").items())
    added = (name, hashlib.sha256(b"another").hexdigest())
    twice = [added, *signed] if is_first else [*signed, added]
    has_both = [entry for entry, _ in twice].count(name) == 2

    assert auth.verify(scope_of(twice)) is not has_both
    assert auth.verify(scope_of(signed)) is has_both


@pytest.mark.parametrize("stamp", ["\xb2", "\xb9000", "-1", "1e3", "", "9" * 13])
def test_a_stamp_that_is_no_number_is_refused(stamp):
    """Digits such as `²`, which int() does not read, are refused like letters."""
    auth = ClusterAuth(TOKEN, lambda: 1000.0)
    assert not auth.verify(scope_of([(SIGNATURE_HEADER, f"v1 {stamp} a b")]))
    assert not check_digest("\xb2", b"")


@pytest.mark.parametrize("wrong", ["", "00" * 31, "0" * 63 + "g", "00" * 33, "AB" * 32, 7])
def test_a_malformed_fingerprint_is_a_400(wrong):
    """A part of a fingerprint, which could match several models, is not a fingerprint."""

    async def scenario(harness):
        real = harness.add()
        await harness.ready(real)
        body = (await harness.known())[real.name] | {"instance_id": "b", "fingerprint": wrong}
        answer = await harness.client.post(
            "/instances", json=body, headers={TOKEN_HEADER: TOKEN}
        )
        assert answer.status_code == 400

    run(scenario)


def test_a_refusal_does_not_reveal_the_model():
    """A router with the maximum of groups refuses another one. The 409 contains no value of the
    cluster, and fingerprints are compared completely: one other digit is another group."""

    async def scenario(harness):
        real = harness.add()
        await harness.ready(real)
        known = (await harness.known())[real.name]
        for number in range(MAX_GROUPS):
            almost = known["fingerprint"][:-1] + "abcdef"[number]
            place = {"instance_id": almost, "url": f"http://127.0.0.1:{1 + number}"}
            answer = await harness.client.post(
                "/instances",
                json=known | place | {"fingerprint": almost},
                headers={TOKEN_HEADER: TOKEN},
            )
        assert answer.status_code == 409
        assert known["fingerprint"][:8] not in answer.text
        assert "16" not in answer.text
        groups = {entry["group"] for entry in (await harness.known()).values()}
        assert len(groups) == MAX_GROUPS

    run(scenario, stale_s=20.0, forget_s=30.0)


def test_the_clients_key_stays_at_the_router():
    """Instances learn who the client is from the router's signed header, not from its key."""

    async def scenario(harness):
        seen = []
        instance = harness.add()
        harness.client.headers["authorization"] = f"Bearer {KEY}"
        await harness.ready(instance)
        app = instance.readiness._app

        async def watch(scope, receive, send):
            seen.append(dict(scope["headers"]))
            await app(scope, receive, send)

        instance.readiness.open(watch)
        assert (await harness.complete()).status_code == 200
        assert seen
        for headers in seen:
            assert b"authorization" not in headers
            assert SIGNATURE_HEADER.encode() in headers
            assert KEY not in str(headers)
            assert TOKEN not in str(headers)

    run(scenario, api_key=KEY)


def test_an_instance_believes_the_caller_header_of_its_router_only():
    """A client cannot become another tenant or choose a prefill instance."""

    async def scenario(harness):
        instance = harness.add(role="decode", peer_address="127.0.0.1:9")
        await harness.ready(instance)
        async with httpx.AsyncClient(base_url=instance.url) as direct:
            answer = await direct.post(
                "/v1/completions",
                json={"prompt": "hello"},
                headers={"x-headwater-prefill": "127.0.0.1:9"},
            )
        assert answer.status_code == 403

    run(scenario)


def test_a_wrong_answer_after_registration_stops_nothing():
    """Lesson 83: a router that was restarted with another token refuses heartbeats. The
    instance continues to serve, reports it in /health, and is registered again when the router
    accepts it."""

    async def scenario(harness):
        instance = harness.add()
        await harness.ready(instance)
        cluster, mended = harness.process._access.cluster, instance.service
        right, cluster._token = cluster._token, b"another"

        async with asyncio.timeout(10), httpx.AsyncClient(base_url=instance.url) as direct:
            while mended.router_health[harness.url].registered:  # noqa: ASYNC110 -- has no event
                await asyncio.sleep(0.01)
            health = await direct.get("/health")
            answer = await direct.post("/v1/completions", json={"prompt": "hello"})
            assert (health.status_code, answer.status_code) == (200, 200)
            (shown,) = health.json()["routers"]
            assert shown["registered"] is False
            assert "403" in shown["error"]
            assert not instance.membership.done()

            cluster._token = right
            while not mended.router_health[harness.url].registered:  # noqa: ASYNC110 -- has no event
                await asyncio.sleep(0.01)

    run(scenario)


def test_a_digest_belongs_to_its_body():
    """The signed digest is that of the body."""
    headers = ClusterAuth(TOKEN, lambda: 1.0).sign("POST", "/instances", {}, b"body")
    assert headers[DIGEST_HEADER] == hashlib.sha256(b"body").hexdigest()
