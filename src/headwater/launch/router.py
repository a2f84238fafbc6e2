"""The router process: binds a port, serves, follows its instances, drains, ends. No torch."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Protocol

import aiohttp
import uvloop
import zmq.asyncio

from headwater.clock import Clock, SystemClock
from headwater.engine.tokenizer import Tokenizer
from headwater.launch.signals import StopSignals, on_hangup, unix_s
from headwater.metrics.kv_curve import CurveKeys
from headwater.native import block_keys
from headwater.server.access import make_access_policy
from headwater.server.http import HttpServer
from headwater.server.listener import bind, url_of
from headwater.server.middleware import ReadinessMiddleware
from headwater.server.router.app import Router, create_router_app
from headwater.server.router.config import RouterConfig
from headwater.server.router.forwarding import Forwarder
from headwater.server.router.instance import Instance
from headwater.server.router.kv_follower import KvEventFollower
from headwater.server.router.metrics import RouterRecorder
from headwater.server.router.prompts import PromptReader
from headwater.server.router.registry import Registry, RegistryObserver

log = logging.getLogger(__name__)


def route(config: RouterConfig, announce: Callable[[str], None], signals: StopSignals) -> int:
    """Run a router until one of `signals`, and return the exit code. `announce` gets the URL.

    Raises ConfigError or ModelError when the router cannot start.
    """
    with contextlib.closing(bind(config.host, config.port)) as listener:
        tokenizer = None if config.model is None else Tokenizer(config.model)
        block_keys.prepare()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(RouterProcess(config, listener, tokenizer, announce).run(signals))


class Signals(Protocol):
    """Tells a process to stop; `StopSignals` implements it."""

    def attach(self, stop: Callable[[], None]) -> None:
        """Call `stop` in the running event loop when the process must stop."""


class RouterProcess:
    """One run of a router on a bound socket."""

    def __init__(
        self,
        config: RouterConfig,
        listener: socket.socket,
        tokenizer: Tokenizer | None,
        announce: Callable[[str], None],
    ) -> None:
        self._config = config
        self._listener = listener
        self._tokenizer = tokenizer
        self._announce = announce
        self._clock = SystemClock()
        token = config.peer_token
        self._curve = None if token is None else CurveKeys.of_token(token)
        self._access = make_access_policy(
            config, self._clock, unix_s, is_insecure=config.is_insecure
        )
        self._readiness = ReadinessMiddleware(self._access)
        self._http = HttpServer(
            self._readiness,
            tls=config.tls,
            limits=config.connections,
        )
        self._followers: dict[Instance, KvEventFollower] = {}
        self._drain: asyncio.Task[None] | None = None

    async def run(self, signals: Signals) -> int:
        """Serve until stopped; return the exit code."""
        config, clock = self._config, self._clock
        self._context = zmq.asyncio.Context()
        registry = Registry(
            config, clock, RegistryObserver(joined=self._joined, left=self._left)
        )
        signals.attach(self._stop)
        on_hangup(self._access.keys.reload)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ssl=True if config.tls is None else config.tls.client_context()
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
            auto_decompress=False,
        ) as session:
            prompts = PromptReader(self._tokenizer, session, self._access.cluster)
            sweep = asyncio.create_task(_sweep(registry, config.sweep_s))
            try:
                self._readiness.open(
                    create_router_app(self._router(clock, registry, prompts, session))
                )
                self._announce(url_of(self._listener, tls=config.tls is not None))
                await self._http.serve(sockets=[self._listener])
            finally:
                sweep.cancel()
                if self._drain is not None:
                    self._drain.cancel()
                followers = list(self._followers.values())
                registry.close()
                prompts.close()
                await asyncio.gather(*(follower.ended() for follower in followers))
                self._context.destroy(linger=0)
        return 0

    def _router(
        self,
        clock: Clock,
        registry: Registry,
        prompts: PromptReader,
        session: aiohttp.ClientSession,
    ) -> Router:
        recorder = RouterRecorder()
        forwarder = Forwarder(
            self._config, clock, registry, prompts, session, recorder, self._access.cluster
        )
        return Router(
            config=self._config,
            clock=clock,
            registry=registry,
            forwarder=forwarder,
            recorder=recorder,
            created_s=int(unix_s()),
        )

    def _joined(self, instance: Instance) -> None:
        self._followers[instance] = KvEventFollower(instance, self._context, keys=self._curve)

    def _left(self, instance: Instance) -> None:
        self._followers.pop(instance).close()

    def _stop(self) -> None:
        """Begin to drain. A second signal stops at once."""
        if self._drain is None:
            self._readiness.drain()
            self._drain = asyncio.get_running_loop().create_task(self._finish_and_stop())
        else:
            log.warning("second signal, stopping now: running=%d", self._readiness.num_running)
            self._http.stop(at_once=True)

    async def _finish_and_stop(self) -> None:
        """Stop when running requests have ended, or after the drain timeout."""
        log.info("drain begun: running=%d", self._readiness.num_running)
        await self._readiness.wait_idle(self._config.drain_timeout_s)
        log.info("drain ended: cut_off=%d", self._readiness.num_running)
        self._http.stop()


async def _sweep(registry: Registry, interval_s: float) -> None:
    """Remove instances whose heartbeat is overdue."""
    while True:
        await asyncio.sleep(interval_s)
        registry.expire()
