"""The HTTP server (uvicorn) on a bound socket."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from headwater.clock import SystemClock
from headwater.server.balanced_listener import BalancedListener
from headwater.server.config import ConnectionLimits
from headwater.server.connection_counts import ConnectionCounts
from headwater.server.connections import ConnectionGuard, GuardedProtocol
from headwater.server.tls import TlsConfig

_KEEP_ALIVE_S = 65
"""Longer than the usual idle timeout of clients and proxies, so that they close first."""

CLOSE_S = 5
"""Time to send the responses of requests that were just aborted."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tls: TlsConfig | None = None,
        limits: ConnectionLimits | None = None,
        counts: ConnectionCounts | None = None,
    ) -> None:
        """The owner waits for running requests before `stop`; uvicorn then closes connections."""
        config = uvicorn.Config(
            app,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_S,
        )
        config.load()
        config.ssl = None if tls is None else tls.server_context()
        self.guard = ConnectionGuard(limits or ConnectionLimits(), SystemClock(), counts)
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop`, closing connections whose time is up."""
        sweep = asyncio.create_task(self.guard.sweep())
        try:
            await super().serve(sockets)
        finally:
            sweep.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections. uvicorn itself would accept every connection that waits,
        however many this worker has already."""
        await super().startup(sockets=[])
        config = self.config

        def make_protocol() -> GuardedProtocol:
            return GuardedProtocol(
                config=config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                guard=self.guard,
            )

        self.servers = [
            BalancedListener(listener, make_protocol, self.guard.counts, config.ssl)  # type: ignore[misc]  # has what uvicorn uses
            for listener in sockets or []
        ]

    def stop(self, *, at_once: bool = False) -> None:
        """Refuse new connections and end within `CLOSE_S`, or at once with connections open."""
        self.should_exit = True
        self.force_exit |= at_once

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the owner: uvicorn would end by the signal instead of with code
        0."""
        yield
