"""TLS for servers and routers, and mutual TLS inside a cluster."""

import asyncio
import ssl

import httpx
import pytest

from headwater.cli import main
from headwater.errors import ConfigError
from headwater.server.tls import TlsConfig
from tests.router.harness import run


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
    """Certificates for further instances fit those that exist."""
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
    """The router verifies whom it sends prompts to: a foreign CA is no instance of ours."""
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


@pytest.mark.parametrize("missing", ["ssl_certfile", "ssl_keyfile", "ssl_ca_certs"])
def test_a_file_that_cannot_be_used_is_named(folder, missing):
    """Before anything is loaded."""
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
