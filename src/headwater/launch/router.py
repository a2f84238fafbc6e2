"""The router process: binds, serves, follows its instances, drains, ends. Never imports torch."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Protocol

import aiohttp
import uvloop
import zmq.asyncio
from starlette.types import Scope

from headwater.clock import Clock, SystemClock
from headwater.engine.tokenizer import Tokenizer
from headwater.launch.server import StopSignals
from headwater.native import block_keys
from headwater.server.http import HttpServer, bind, url_of
from headwater.server.middleware import ReadinessMiddleware, is_public
from headwater.server.router.app import Router, create_router_app
from headwater.server.router.config import RouterConfig
from headwater.server.router.forwarding import Forwarder
from headwater.server.router.instance import Instance
from headwater.server.router.kv_follower import KvEventFollower
from headwater.server.router.metrics import RouterRecorder
from headwater.server.router.prompts import PromptReader
from headwater.server.router.registry import Registry, RegistryObserver

_SWEEP_S = 0.25


def route(config: RouterConfig, announce: Callable[[str], None], signals: StopSignals) -> int:
    """Route until told to stop by one of `signals`; the exit code. `announce` gets the URL.

    Raises ConfigError or ModelError, with a sentence, where nothing can be routed.
    """
    with contextlib.closing(bind(config.host, config.port)) as listener:
        tokenizer = None if config.model is None else Tokenizer(config.model)
        block_keys.prepare()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(RouterProcess(config, listener, tokenizer, announce).run(signals))


class Signals(Protocol):
    """What tells a process to stop; `StopSignals` is the real one."""

    def attach(self, stop: Callable[[], None]) -> None:
        """Call `stop` in the running event loop when the process is told to stop."""


class RouterProcess:
    """One life of a router, on a socket that is bound already."""

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
        self._gate = ReadinessMiddleware(config.api_key, is_open=_needs_no_key)
        self._http = HttpServer(self._gate, drain_timeout_s=config.drain_timeout_s)
        self._followers: dict[Instance, KvEventFollower] = {}

    async def run(self, signals: Signals) -> int:
        """Everything from the first byte to the exit code."""
        config, clock = self._config, SystemClock()
        self._context = zmq.asyncio.Context()
        registry = Registry(
            config, clock, RegistryObserver(joined=self._joined, left=self._left)
        )
        signals.attach(self._stop)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_timeout_s),
            auto_decompress=False,
        ) as session:
            prompts = PromptReader(self._tokenizer, session)
            sweep = asyncio.create_task(_sweep(registry))
            try:
                self._gate.open(
                    create_router_app(self._router(clock, registry, prompts, session))
                )
                self._announce(url_of(self._listener))
                await self._http.serve(sockets=[self._listener])
            finally:
                sweep.cancel()
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
        forwarder = Forwarder(self._config, clock, registry, prompts, session, recorder)
        return Router(
            config=self._config,
            clock=clock,
            registry=registry,
            forwarder=forwarder,
            recorder=recorder,
        )

    def _joined(self, instance: Instance) -> None:
        self._followers[instance] = KvEventFollower(instance, self._context)

    def _left(self, instance: Instance) -> None:
        self._followers.pop(instance).close()

    def _stop(self) -> None:
        """Take nothing new; end when what runs has ended, or its time is up."""
        self._gate.shut("the router is stopping")
        self._http.stop()


def _needs_no_key(scope: Scope) -> bool:
    """Health and the page, as everywhere; and instances, which show the peer token instead."""
    is_instance = scope["path"].startswith("/instances") and scope["method"] != "GET"
    return is_instance or is_public(scope)


async def _sweep(registry: Registry) -> None:
    """Forget instances as their time comes."""
    while True:
        await asyncio.sleep(_SWEEP_S)
        registry.expire()
