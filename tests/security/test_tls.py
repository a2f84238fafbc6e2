"""TLS for servers and routers, and mutual TLS inside a cluster."""

import asyncio
import contextlib
import re
import shlex
import socket
import ssl
from pathlib import Path

import httpx
import pytest

from headwater.cli import main
from headwater.clock import SystemClock
from headwater.errors import ConfigError
from headwater.server.router.protocol import TOKEN_HEADER
from headwater.server.tls import TlsConfig
from tests.router.harness import TOKEN, run
from tests.router.live import LiveCommand
from tests.security.test_connection_limits import HEALTH, Live
from tests.security.test_sockets import listening, processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certs")
    assert main(["certs", str(folder), "router", "instance"]) == 0
    return folder


def tls(folder, name="router", **changes):
    files = {
        "ssl_certfile": str(folder / f"{name}.pem"),
        "ssl_keyfile": str(folder / f"{name}-key.pem"),
        "ssl_ca_certs": str(folder / "ca.pem"),
    }
    return TlsConfig(**files | changes)


def trusting(folder):
    return ssl.create_default_context(cafile=str(folder / "ca.pem"))


def test_keys_are_for_their_owner_only(folder):
    """Private keys are not readable by others, and certificates verify by name."""
    for path in folder.glob("*-key.pem"):
        assert path.stat().st_mode & 0o077 == 0


def test_a_second_run_uses_the_same_ca(folder):
    """Certificates for further instances are signed by the CA of the existing ones."""
    before = (folder / "ca.pem").read_bytes()
    assert main(["certs", str(folder), "another", "--hosts", "10.0.0.7,node-7"]) == 0
    assert (folder / "ca.pem").read_bytes() == before
    tls(folder, "another").server_context()


def test_a_cluster_speaks_tls(folder):
    """Clients reach the router over HTTPS, and the router its instances with certificates."""

    async def scenario(harness):
        instance = harness.add(tls=tls(folder, "instance"))
        assert harness.url.startswith("https://")
        assert instance.url.startswith("https://")
        await harness.ready(instance)
        assert (await harness.complete()).status_code == 200

    run(scenario, tls=tls(folder), verify=trusting(folder))


def test_clients_that_negotiate_nothing_are_limited_and_ended(folder):
    """Connections count before TLS is negotiated: with every one in use, the oldest is closed for
    a new client. The others end after the time for headers, and with the server."""

    async def scenario():
        limits = {"max_connections": 8, "header_timeout_s": 0.5}
        async with Live(tls=tls(folder, "instance"), **limits) as live:
            silent = [await asyncio.open_connection(*live.address) for _ in range(40)]
            for _ in range(3):
                assert (await live.ask(HEALTH)).startswith(b"HTTP/1.1 200")
            assert live.http.guard.num_open <= 8
            async with asyncio.timeout(20):
                for reader, _ in silent:
                    assert await reader.read() == b""
            reader, last = await asyncio.open_connection(*live.address)
            while not live.http.guard.num_open:  # noqa: ASYNC110 -- it has no event
                await asyncio.sleep(0)
            async with asyncio.timeout(4):  # less than what uvicorn waits for connections
                live.http.stop()
                await live.task
                assert await reader.read() == b""
        for _, writer in (*silent, (reader, last)):
            writer.close()

    asyncio.run(scenario())


def test_plain_http_and_foreign_cas_fail(folder, tmp_path):
    """A client that expects no TLS, or trusts another CA, gets no answer."""
    assert main(["certs", str(tmp_path / "other"), "x"]) == 0

    async def scenario(harness):
        for url, verify in (
            (harness.url.replace("https", "http"), True),
            (harness.url, trusting(tmp_path / "other")),
        ):
            async with httpx.AsyncClient(verify=verify, timeout=5) as client:
                with pytest.raises(httpx.TransportError):
                    await client.get(f"{url}/health")

    run(scenario, tls=tls(folder), verify=trusting(folder))


def test_an_instance_without_a_certificate_of_the_cluster_is_not_used(folder, tmp_path):
    """The router verifies the instances to which it sends prompts: a foreign CA is refused."""
    assert main(["certs", str(tmp_path / "other"), "x"]) == 0
    other = TlsConfig(
        ssl_certfile=str(tmp_path / "other/x.pem"),
        ssl_keyfile=str(tmp_path / "other/x-key.pem"),
        ssl_ca_certs=str(folder / "ca.pem"),
    )

    async def scenario(harness):
        harness.add(tls=other)
        await asyncio.sleep(0.3)
        answer = await harness.complete()
        assert answer.status_code == 503

    run(scenario, tls=tls(folder), verify=trusting(folder))


def test_a_router_sends_no_prompt_to_a_server_of_another_ca(folder, tmp_path):
    """No prompt is sent even if the server's address was registered: the certificate at the
    address decides."""
    assert main(["certs", str(tmp_path / "other"), "x"]) == 0
    foreign = TlsConfig(
        ssl_certfile=str(tmp_path / "other/x.pem"),
        ssl_keyfile=str(tmp_path / "other/x-key.pem"),
    )

    async def scenario(harness):
        real, other = harness.add(tls=tls(folder, "instance")), harness.add(tls=foreign)
        await harness.ready(real)
        known = (await harness.known())[real.name]
        answer = await harness.client.post(
            "/instances",
            json=known | {"instance_id": other.name, "url": other.url, "epoch": "2"},
            headers={TOKEN_HEADER: TOKEN},
        )
        assert answer.status_code == 200
        await real.memberships.leave()
        assert (await harness.complete()).status_code == 503
        assert other.num_steps == 0

    run(scenario, tls=tls(folder), verify=trusting(folder), stale_s=20.0, forget_s=30.0)


@pytest.mark.parametrize("missing", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_a_file_that_cannot_be_used_is_named(folder, missing):
    """The message comes before anything is loaded."""
    flag = "--" + missing.replace("_", "-")
    with pytest.raises(ConfigError, match=flag):
        tls(folder, **{missing: "/nowhere.pem"}).server_context()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ssl-certfile", "a.pem"], "must be given together"),
        (["--ssl-ca-certs", "a.pem"], "needs --ssl-certfile"),
    ],
)
def test_half_of_the_flags_is_an_error(flags, words, capsys):
    """A server does not silently start without TLS."""
    assert main(["route", "--insecure", *flags]) == 1
    assert words in capsys.readouterr().err


def test_up_refuses_half_of_the_flags(capsys):
    """The error comes before any process is started."""
    assert main(["up", "--mixed", "1", "--ssl-certfile", "a.pem"]) == 1
    assert "must be given together" in capsys.readouterr().err


def first_bytes(address, context=None):
    """What a listener sends to a client that sends nothing, or that uses TLS."""
    with (
        socket.create_connection(address, timeout=5) as plain,
        contextlib.ExitStack() as opened,
    ):
        client = plain
        if context is not None:
            client = opened.enter_context(context.wrap_socket(plain))
        client.settimeout(0.3 if context is None else 5)
        with contextlib.suppress(TimeoutError, ConnectionError):
            return client.recv(64)
    return b""


def documented(folder, command):
    """The arguments of a command in docs/security.md, with the files of `folder`."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    line = page[page.index(f"\n{command}") :].replace("\\\n", "").splitlines()[1]
    return shlex.split(line.replace("certs/", f"{folder}/"))[2:]


def until_registered(client, url, count, within_s=60.0):
    """Until this many instances have registered and their caches are known."""
    clock = SystemClock()
    deadline_s = clock.now() + within_s
    while True:
        known = client.get(f"{url}/instances").json()["instances"]
        if [entry["trust"] for entry in known] == ["exact"] * count:
            return
        assert clock.now() < deadline_s, known


@pytest.mark.slow
def test_a_cluster_hands_over_in_mutual_tls(folder):
    """After `headwater up` with the files of `headwater certs`, clients, router, instances,
    peers and the tcp link all speak TLS, and a prompt is prefilled on one instance and decoded
    on the other. A listener of peers or blocks greets members of the cluster only."""
    files = tls(folder, "instance")
    small = ("--threads", "1", "--num-gpu-blocks-override", "64", "--max-model-len", "2048")
    command = LiveCommand("up", "--port", "0", *documented(folder, "headwater up "), *small)
    command.until_printed("stop with", within_s=240)
    urls = dict(line.split()[:2] for line in command.lines if " pid " in line)
    with httpx.Client(verify=trusting(folder), timeout=60) as client:
        until_registered(client, urls["router"], len(urls) - 1)
        prompt = "the water of a mountain spring, " * 20
        answer = client.post(
            f"{urls['router']}/v1/completions", json={"prompt": prompt, "max_tokens": 8}
        )
        counted = client.get(f"{urls['decode-1']}/metrics").text
        others = [
            place
            for place in listening(processes(command.process.pid))
            if f"https://{place[0]}:{place[1]}" not in urls.values()
        ]
        greetings = [first_bytes(place) for place in others]
        member = files.client_context()
        member.check_hostname = False
        greeted = []
        for place in others:
            with contextlib.suppress(OSError):
                greeted.append(first_bytes(place, member))
    assert command.stop() == 0, command.lines

    assert answer.status_code == 200, answer.text
    assert all(url.startswith("https://") for url in urls.values())
    assert f"headwater top {urls['router']} --ssl-ca-certs {folder}/ca.pem" in "".join(
        command.lines
    )
    done = re.search(r'pd_handoffs_total\{side="decode"\} (\S+)', counted)
    assert done is not None, [line for line in counted.splitlines() if "pd_" in line]
    assert float(done[1]) == 1
    assert not [greeting for greeting in greetings if greeting.startswith(b"HW")]
    assert len([greeting for greeting in greeted if greeting.startswith(b"HW")]) >= 4
