"""TLS of HTTP listeners and of connections between router and instances."""

import ssl
from dataclasses import dataclass

from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """TLS of a listener and of connections between the processes of one cluster."""

    ssl_certfile: str
    """PEM file with the certificate, followed by its intermediate certificates."""

    ssl_keyfile: str
    """PEM file with the private key."""

    ssl_ca_certs: str | None = None
    """PEM file with the cluster's CA. With it, router, instances and peers verify each other
    (mutual TLS); None verifies with the system's CAs and asks for no client certificate."""

    def server_context(self) -> ssl.SSLContext:
        """The context of listeners. With a CA, a client certificate is verified if one is sent."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context)
        if self.ssl_ca_certs is not None:
            context.verify_mode = ssl.CERT_OPTIONAL
        return context

    def client_context(self) -> ssl.SSLContext:
        """The context of connections to other processes of the cluster; presents the
        certificate."""
        context = ssl.create_default_context(cafile=self.ssl_ca_certs)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(context)
        if self.ssl_ca_certs is not None:
            # Only membership in the cluster counts. Addresses of instances change, so names in
            # certificates are not compared. The CA must sign certificates of this cluster only.
            context.check_hostname = False
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        try:
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(
                f"--ssl-certfile {self.ssl_certfile} with --ssl-keyfile {self.ssl_keyfile}: "
                f"{exc}; both must be PEM files that belong together"
            ) from exc
        if self.ssl_ca_certs is not None:
            try:
                context.load_verify_locations(self.ssl_ca_certs)
            except (OSError, ssl.SSLError) as exc:
                raise ConfigError(
                    f"--ssl-ca-certs {self.ssl_ca_certs}: {exc}; it must be a PEM file"
                ) from exc
