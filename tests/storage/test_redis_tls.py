"""Redis over TLS on loopback, with certificates made by the test."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.storage import BlockRead, BlockWrite, Opening, StorageBackend, open_storage
from headwater.testing.ports import await_port, free_port
from headwater.testing.storage import make_format, make_keys, read_run, write_run
from tests.storage.conftest import RedisServer

BLOCK_BYTES = 8192


def openssl(*words: str) -> None:
    done = subprocess.run(["openssl", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"openssl cannot make a certificate here: {done.stderr[-200:]}")


@dataclass(frozen=True)
class Authority:
    """A certificate authority of one test."""

    folder: Path
    name: str

    def __post_init__(self) -> None:
        key = (
            f"ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={self.name}".split()
        )
        files = ["-keyout", self.path("ca.key"), "-out", self.path("ca.pem")]
        openssl("req", "-x509", "-newkey", *key, *files)

    def path(self, file: str) -> str:
        return str(self.folder / f"{self.name}-{file}")

    def issue(self, who: str) -> tuple[str, str]:
        """A certificate for 127.0.0.1 and its key."""
        cert, key, request = self.path(f"{who}.pem"), self.path(f"{who}.key"), self.path("csr")
        names = self.folder / "names"
        names.write_text("subjectAltName=IP:127.0.0.1\n")
        made = f"-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={who}".split()
        openssl("req", *made, "-keyout", key, "-out", request)
        signed = ["-CA", self.path("ca.pem"), "-CAkey", self.path("ca.key"), "-CAcreateserial"]
        out = ["-out", cert, "-days", "2", "-extfile", str(names)]
        openssl("x509", "-req", "-in", request, *signed, *out)
        return cert, key


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "ours")


@pytest.fixture
def url(authority: Authority, tmp_path: Path) -> Iterator[str]:
    """A server that wants a certificate of our authority, and a password."""
    cert, key = authority.issue("server")
    port = free_port()
    tls = ["--tls-port", str(port), "--tls-auth-clients", "yes"]
    tls += ["--tls-cert-file", cert, "--tls-key-file", key]
    tls += ["--tls-ca-cert-file", authority.path("ca.pem")]
    server = RedisServer(tmp_path, *tls, "--requirepass", "open sesame")
    await_port(port, server._process)
    yield f"rediss://:open%20sesame@127.0.0.1:{port}"
    server.stop()


def open_tls(url: str, **settings: str) -> StorageBackend:
    form = make_format(block_bytes=BLOCK_BYTES)
    return open_storage("redis", {"url": url, **settings}, Opening(format=form))


def test_blocks_travel_with_client_certificates(url: str, authority: Authority) -> None:
    """Both sides authenticate; large batches go in both directions."""
    cert, key = authority.issue("client")
    storage = open_tls(
        url, tls_ca_file=authority.path("ca.pem"), tls_cert_file=cert, tls_key_file=key
    )
    keys = make_keys(64)

    assert write_run(storage, keys, BLOCK_BYTES) == [BlockWrite.WRITTEN] * 64
    assert storage.contains([keys], timeout_s=5) == [64]
    assert read_run(storage, keys, BLOCK_BYTES) == [BlockRead.READ] * 64
    storage.close()


def test_an_untrusted_certificate_gets_a_message_at_start(
    url: str, authority: Authority, tmp_path: Path
) -> None:
    """The start fails without a certificate, with one of another authority, for an unknown
    server, and without a password."""
    ours = {"tls_ca_file": authority.path("ca.pem")}
    cert, key = authority.issue("client")
    with pytest.raises(
        ConfigError, match=r"(?i)certificate.required|require a client certificate"
    ):
        open_tls(url, **ours)
    other_cert, other_key = Authority(tmp_path, "other").issue("client")
    with pytest.raises(ConfigError, match=r"(?i)unknown.ca|require a client certificate"):
        open_tls(url, **ours, tls_cert_file=other_cert, tls_key_file=other_key)
    with pytest.raises(ConfigError, match="CERTIFICATE_VERIFY_FAILED"):
        open_tls(url, tls_cert_file=cert, tls_key_file=key)
    with pytest.raises(ConfigError, match="requires a password"):
        open_tls(
            f"rediss://{url.partition('@')[2]}", **ours, tls_cert_file=cert, tls_key_file=key
        )


def test_files_that_do_not_fit_are_named(authority: Authority) -> None:
    """The message comes before any connection is tried."""
    cert, _ = authority.issue("client")
    url = "rediss://127.0.0.1:1"
    with pytest.raises(ConfigError, match=r"tls_cert_file '.*' with tls_key_file '.*ca.key'"):
        open_tls(url, tls_cert_file=cert, tls_key_file=authority.path("ca.key"))
    with pytest.raises(ConfigError, match="tls_key_file needs tls_cert_file"):
        open_tls(url, tls_key_file=authority.path("ca.key"))
    with pytest.raises(ConfigError, match="tls_ca_file '/nowhere'"):
        open_tls(url, tls_ca_file="/nowhere")
