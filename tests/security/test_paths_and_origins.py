"""Paths are forwarded unchanged, and web pages of other sites control nothing."""

from urllib.parse import unquote

import httpx
import pytest
from starlette.requests import Request

from headwater.server.access import HostPolicy
from headwater.server.errors import RequestRefused
from headwater.server.router.forwarding import _raw_path
from tests.router.harness import run as run_router
from tests.server.harness import error, run

CONTROL = (
    "/v1/pause",
    "/v1/resume",
    "/reset_prefix_cache",
    "/flush_cache",
    "/v1/abort_requests",
)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/..%2f..%2fstats",
        "/v1/models/..%2F..%2Fserver_info",
        "/v1/models/%2e%2e/%2e%2e/stats",
        "/v1/models/x/..%2f..%2f..%2fcache",
        "/v1/models/../../stats",
        "/v1/models/..%252f..%252fstats",
    ],
)
def test_a_path_through_the_router_reaches_no_other_page(path):
    """Lesson 82: encoded and plain dot segments never reach the instances' own pages."""

    async def scenario(harness):
        instance = harness.add()
        await harness.ready(instance)
        seen = instance.note_paths()
        reader, writer = await _connect(harness.url)
        writer.write(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 404"), answer[:300]
        assert b"num_steps" not in answer
        assert not [entry for entry in seen if "/../" in f"{entry}/"]

    run_router(scenario)


async def _connect(url):
    import asyncio

    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


def test_names_of_models_still_pass_the_router():
    """A name with a slash or an encoded character is found."""

    async def scenario(harness):
        await harness.ready(harness.add())
        assert (await harness.client.get("/v1/models/echo")).json()["id"] == "echo"
        assert (await harness.client.get("/v1/models/%65cho")).json()["id"] == "echo"
        assert (await harness.client.get("/v1/models/a%2Fb")).status_code == 404

    run_router(scenario)


def test_a_path_is_forwarded_as_it_was_sent():
    """The path is not decoded and encoded again, so the instance matches the same route as the
    router did. A path with dot segments, plain or encoded, is not forwarded."""

    def forwarded(raw):
        path = unquote(raw.decode())
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": raw, "headers": []}
        return _raw_path(Request(scope))

    assert forwarded(b"/v1/responses/resp%5Fa%2Fb%3Fc") == "/v1/responses/resp%5Fa%2Fb%3Fc"
    for raw in (
        b"/v1/responses/../../stats",
        b"/v1/responses/..%2f..%2fstats",
        b"/v1/responses/%2e%2e/stats",
        b"/v1/responses/./x",
        b"/v1/responses/a%2f..%2f..%2fstats",
    ):
        with pytest.raises(RequestRefused):
            forwarded(raw)


@pytest.mark.parametrize("path", CONTROL)
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:1", "http://[", "http://[x]"]
)
def test_a_page_of_another_origin_controls_nothing(path, origin):
    """The request is refused with a body or without one, whatever its content type."""

    async def scenario(harness):
        post, headers = harness.client.post, {"origin": origin}
        for body in (b"", b'{"abort_all": true}'):
            answer = await post(path, content=body, headers=headers)
            assert error(answer, 403)["code"] == "cross_origin"
            answer = await post(
                path, content=body, headers=headers | {"content-type": "text/plain"}
            )
            assert error(answer, 403)["code"] == "cross_origin"

    run(scenario)


@pytest.mark.parametrize("path", CONTROL)
def test_a_control_body_is_json(path):
    """A form or plain text, which browsers send without a preflight, is refused."""

    async def scenario(harness):
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            answer = await harness.client.post(
                path, content=b'{"abort_all": true}', headers={"content-type": kind}
            )
            assert error(answer, 415)["code"] == "content_type"

    run(scenario)


def test_the_servers_own_page_may_control_it():
    """Requests of the server's own page have the same origin and no body, or JSON."""

    async def scenario(harness):
        headers = {"origin": "http://localhost"}
        for path in ("/v1/pause", "/v1/resume"):
            assert (await harness.client.post(path, headers=headers)).status_code == 200
        body = {"abort_all": True}
        assert (
            await harness.post("/v1/abort_requests", body, headers=headers)
        ).status_code == 200

    run(scenario)


@pytest.mark.parametrize("path", CONTROL)
def test_a_get_changes_nothing(path):
    """Images and links of other pages send GET requests."""

    async def scenario(harness):
        assert (await harness.client.get(path)).status_code == 405

    run(scenario)


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "[", "[::1", "a]b", "[x]"],
)
def test_a_rebound_name_is_refused(host):
    """In DNS rebinding, a foreign name resolves to this server."""

    async def scenario(harness):
        for path in ("/v1/models", "/stats", "/dashboard"):
            answer = await harness.client.get(path, headers={"host": host})
            assert error(answer, 421)["code"] == "host_not_allowed"
        assert (await harness.client.get("/health", headers={"host": host})).status_code == 200

    run(scenario)


@pytest.mark.parametrize(
    ("bound", "allowed", "any_name", "accepted", "refused"),
    [
        (
            "127.0.0.1",
            (),
            False,
            ["localhost", "127.0.0.1:8000", "[::1]:8000"],
            ["10.0.0.1", "a.b"],
        ),
        ("10.0.0.1", (), False, ["10.0.0.1:80", "localhost"], ["10.0.0.2", "box"]),
        ("10.0.0.1", ("box",), False, ["BOX:8000"], ["boxx"]),
        ("0.0.0.0", (), False, ["10.9.9.9:8000", "[fe80::1]"], ["box"]),
        ("0.0.0.0", (), True, ["anything.at.all"], []),
        ("127.0.0.1", ("*",), False, ["anything.at.all"], []),
    ],
)
def test_which_hosts_are_accepted(bound, allowed, any_name, accepted, refused):
    """Accepted hosts are loopback names, the bound address, and what --allowed-hosts names."""
    policy = HostPolicy(bound, allowed, any_name=any_name)

    assert all(policy.accepts(host) for host in accepted)
    assert not any(policy.accepts(host) for host in refused)


def test_a_client_that_sends_no_host_is_served():
    """HTTP/1.0 probes have none."""

    async def scenario(harness):
        request = httpx.Request("GET", "http://localhost/v1/models")
        del request.headers["host"]
        assert (await harness.client.send(request)).status_code == 200

    run(scenario)
