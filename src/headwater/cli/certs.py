"""`headwater certs`: a development CA and certificates for the processes of one cluster."""

import datetime
import ipaddress
import os
import socket
import sys
from argparse import ArgumentParser, Namespace, _SubParsersAction
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli.values import add_command
from headwater.errors import ConfigError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_ABOUT = """\
Make a certificate authority (ca.pem, ca-key.pem) in a folder, and certificates signed by it: one
NAME.pem and NAME-key.pem for each name. An existing CA in the folder is used again. For
development and tests; in production use your own CA.

  headwater certs ./certs router instance
  headwater route --ssl-certfile certs/router.pem --ssl-keyfile certs/router-key.pem \\
      --ssl-ca-certs certs/ca.pem
"""


def add_certs(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    parser = add_command(commands, "certs FOLDER NAME... [flags]", _ABOUT)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder for the files")
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="names of the certificates, one file pair each"
    )
    parser.add_argument(
        "--hosts",
        default="",
        metavar="HOST,HOST",
        help="further host names and addresses that the certificates are valid for (default: "
        "loopback and this machine's name)",
    )
    parser.add_argument(
        "--days",
        type=int,
        default=365,
        help="days until the certificates expire (default: %(default)s)",
    )
    parser.set_defaults(flags=[flag for a in parser._actions for flag in a.option_strings])


def run_certs(options: Namespace) -> int:
    """Write the files and return the exit code."""
    if options.days < 1:
        raise ConfigError(f"--days must be at least 1, got {options.days}")
    for name in options.names:
        if not name.replace("-", "").replace("_", "").isalnum() or name == "ca":
            raise ConfigError(
                f"NAME may have letters, digits, - and _ and may not be 'ca', got {name!r}"
            )
    options.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _Authority(options.folder, options.days)
    hosts = [host.strip() for host in options.hosts.split(",") if host.strip()]
    hosts += ["localhost", "127.0.0.1", "::1", socket.gethostname()]
    for name in options.names:
        authority.issue(name, hosts)
        sys.stdout.write(f"{options.folder / name}.pem and {options.folder / name}-key.pem\n")
    sys.stdout.write(f"CA: {options.folder / 'ca.pem'}\n")
    return 0


class _Authority:
    """The CA of one folder: read from its files, or created."""

    def __init__(self, folder: Path, days: int) -> None:
        self._folder = folder
        self._days = days
        if (folder / "ca.pem").exists():
            self._certificate, self._key = _read(folder / "ca.pem", folder / "ca-key.pem")
        else:
            self._certificate, self._key = self._make()

    def issue(self, name: str, hosts: list[str]) -> None:
        """Write a certificate and its key for a server and client called `name`."""
        from cryptography import x509

        key = _new_key()
        names = x509.SubjectAlternativeName(
            [_alternative(host) for host in dict.fromkeys(hosts)]
        )
        builder = self._builder(name, key, self._certificate.subject)
        builder = builder.add_extension(names, critical=False)
        uses = [x509.OID_SERVER_AUTH, x509.OID_CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
            critical=False,
        )
        self._sign_and_write(name, builder, key, self._key)

    def _make(self) -> "tuple[x509.Certificate, EllipticCurvePrivateKey]":
        from cryptography import x509

        key = _new_key()
        subject = x509.Name([_common_name("headwater development CA")])
        builder = self._builder("headwater development CA", key, subject)
        builder = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        )
        builder = builder.add_extension(_signing_usage(), critical=True)
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
        )
        self._sign_and_write("ca", builder, key, key)
        return _read(self._folder / "ca.pem", self._folder / "ca-key.pem")

    def _builder(
        self, name: str, key: "EllipticCurvePrivateKey", issuer: "x509.Name"
    ) -> "x509.CertificateBuilder":
        from cryptography import x509

        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([_common_name(name)]))
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=self._days))
        )

    def _sign_and_write(
        self,
        name: str,
        builder: "x509.CertificateBuilder",
        key: "EllipticCurvePrivateKey",
        signer: "EllipticCurvePrivateKey",
    ) -> None:
        from cryptography.hazmat.primitives import hashes, serialization

        certificate = builder.sign(signer, hashes.SHA256())
        secret = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        _write(self._folder / f"{name}-key.pem", secret, 0o600)
        public = certificate.public_bytes(serialization.Encoding.PEM)
        _write(self._folder / f"{name}.pem", public, 0o644)


def _new_key() -> "EllipticCurvePrivateKey":
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _common_name(name: str) -> "x509.NameAttribute[str]":
    from cryptography import x509

    return x509.NameAttribute(x509.NameOID.COMMON_NAME, name)


def _signing_usage() -> "x509.KeyUsage":
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternative(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _read(certificate: Path, key: Path) -> "tuple[x509.Certificate, EllipticCurvePrivateKey]":
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
        secret = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"the CA in {certificate.parent} cannot be read: {exc}; remove ca.pem and "
            "ca-key.pem to make a new one"
        ) from exc
    if not isinstance(secret, EllipticCurvePrivateKey):
        raise ConfigError(f"{key} is not a key that headwater certs made; use another folder")
    return found, secret


def _write(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
