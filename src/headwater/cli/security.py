"""Flags about access that `serve` and `route` share: keys, hosts, TLS, the peer token."""

import shlex
from argparse import ArgumentParser, Namespace, _ArgumentGroup
from pathlib import Path

from headwater.config import (
    api_key_from_environment,
    check_secret,
    peer_token_from_environment,
)
from headwater.errors import ConfigError
from headwater.server.tls import TlsConfig

TLS_FLAGS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
"""Names of the TLS settings, the same in every command."""


def add_access_flags(parser: ArgumentParser) -> None:
    """Add the flags in a group of their own."""
    group = parser.add_argument_group("access")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="key with all scopes that requests must carry (or HEADWATER_API_KEY)",
    )
    group.add_argument(
        "--api-keys-file",
        metavar="FILE",
        help="JSON file with several keys, their scopes and limits; see docs/security.md",
    )
    group.add_argument(
        "--allowed-hosts",
        metavar="NAME,NAME",
        help="further names accepted in the Host header; * accepts all (default: loopback "
        "names, the bound address; all names when there is a key and --host is not loopback)",
    )
    group.add_argument(
        "--peer-token",
        metavar="TOKEN",
        help="secret that router and instances share (or HEADWATER_PEER_TOKEN)",
    )
    group.add_argument(
        "--peer-token-file", metavar="FILE", help="file with the secret of --peer-token"
    )
    add_tls_flags(group)


def add_tls_flags(parser: ArgumentParser | _ArgumentGroup) -> None:
    """Add the flags of `TLS_FLAGS`."""
    parser.add_argument(
        "--ssl-certfile", metavar="FILE", help="serve HTTPS with this PEM certificate chain"
    )
    parser.add_argument(
        "--ssl-keyfile",
        metavar="FILE",
        help="PEM file with the private key of that certificate",
    )
    parser.add_argument(
        "--ssl-ca-certs",
        metavar="FILE",
        help="PEM file with the CA that router, instances and peers verify each other with",
    )


def api_key_of(options: Namespace) -> str | None:
    """The key from the flag or the environment."""
    return options.api_key if options.api_key is not None else api_key_from_environment()


def commands_to_try(url: str, *, needs_key: bool, ca_certs: str | None) -> tuple[str, str, str]:
    """curl and `headwater top` with the flags that `url` needs, and the heading above them."""
    curl, top, needs = "curl", f"headwater top {url}", []
    if url.startswith("https:"):
        ca = "CA.pem" if ca_certs is None else shlex.quote(ca_certs)
        curl, top = f"{curl} --cacert {ca}", f"{top} --ssl-ca-certs {ca}"
        if ca_certs is None:
            needs.append("your CA's certificate for CA.pem")
    if needs_key:
        curl += ' -H "Authorization: Bearer $HEADWATER_API_KEY"'
        needs.append("an API key of this server in HEADWATER_API_KEY")
    return curl, top, f"try, with {' and '.join(needs)}:" if needs else "try:"


def peer_token_of(options: Namespace) -> str | None:
    """The token from the flag, the file or the environment."""
    if options.peer_token is not None:
        return str(options.peer_token)
    path = options.peer_token_file
    if path is None:
        return peer_token_from_environment()
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--peer-token-file: cannot read {path}: {exc}") from exc
    check_secret("--peer-token-file", token)
    return token


def allowed_hosts_of(options: Namespace) -> tuple[str, ...]:
    """The names of `--allowed-hosts`."""
    return tuple(
        name.strip() for name in (options.allowed_hosts or "").split(",") if name.strip()
    )


def tls_of(options: Namespace) -> TlsConfig | None:
    """The TLS settings; None without a certificate. Raises ConfigError if only a part is
    given."""
    certificate, key, ca = options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs
    if certificate is None and key is None:
        if ca is not None:
            raise ConfigError("--ssl-ca-certs needs --ssl-certfile and --ssl-keyfile")
        return None
    if certificate is None or key is None:
        raise ConfigError("--ssl-certfile and --ssl-keyfile must be given together")
    tls = TlsConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=ca)
    tls.server_context()  # a file that cannot be used is reported before the model is loaded
    return tls
