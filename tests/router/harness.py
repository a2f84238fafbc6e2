"""A router and instances on real sockets, in one event loop: echo engines, everything else
real."""

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

import httpx

from headwater.clock import SystemClock
from headwater.config import KvEventsConfig
from headwater.engine.client import KvEventsInfo
from headwater.launch.router import RouterProcess
from headwater.launch.signals import unix_s
from headwater.metrics.kv_curve import CurveKeys
from headwater.metrics.kv_publisher import KvPublisher
from headwater.server.access import make_access_policy
from headwater.server.app import create_app
from headwater.server.config import ServerConfig
from headwater.server.http import HttpServer
from headwater.server.listener import bind, url_of
from headwater.server.middleware import ReadinessMiddleware
from headwater.server.registration import Memberships
from headwater.server.router.config import RouterConfig
from headwater.server.service import Service
from headwater.testing.engines import EchoEngine, make_echo_core, make_echo_info
from tests.server.harness import byte_tokenizer

TOKEN = "between-us"

QUICK_LOSS = {"stale_s": 0.4, "forget_s": 0.8}
"""For tests in which an instance must be lost."""


class HangingEngine(EchoEngine):
    """While it is held it answers nothing, like an engine that hangs in a step."""

    async def control(self, call):
        await self._flowing.wait()
        return await super().control(call)


class Instance:
    """One echo engine behind HTTP, with KV events, registered at a router."""

    def __init__(
        self, router, *, epoch="1", port=0, token=TOKEN, num_seqs=8, created_s=1.7e9, **changes
    ):
        loop, events = asyncio.get_running_loop(), changes.pop("events", True)
        core = make_echo_core(
            record_events=events, max_num_seqs=num_seqs, num_blocks=8 * num_seqs
        )
        self.publisher = KvPublisher(
            KvEventsConfig(buffer_steps=changes.pop("buffer_steps", 1000)),
            block_tokens=16,
            clock=SystemClock(),
            started_s=1.7e9,
            wake=lambda: loop.call_soon_threadsafe(core.publish),
            keys=None if token is None else CurveKeys.of_token(token),
        )
        core.follow(self.publisher)
        heard = KvEventsInfo(
            endpoint=self.publisher.endpoint,
            replay_endpoint=self.publisher.replay_endpoint,
            topic="",
            buffer_steps=1000,
            curve=token is not None,
        )
        info = replace(make_echo_info(), epoch=epoch, kv_events=heard if events else None)
        tls = changes.pop("tls", None)
        kind, silent_s = changes.pop("engine", EchoEngine), changes.pop("silent_s", 20.0)
        self.engine = kind(core, replace(info, **changes))
        routers = (router,) if isinstance(router, str) else tuple(router)
        config = ServerConfig(port=port, routers=routers, peer_token=token, tls=tls)
        self.service = Service(
            self.engine, byte_tokenizer(), config, SystemClock(), created_s=created_s
        )
        self.listener = bind("127.0.0.1", port)
        self.url = url_of(self.listener, tls=tls is not None)
        self.name = self.url.partition("://")[2]
        access = make_access_policy(config, SystemClock(), unix_s)
        self.cluster = access.cluster
        self.readiness = ReadinessMiddleware(access)
        self.readiness.open(create_app(self.service))
        self.http = HttpServer(self.readiness, tls=tls)
        self.serving = loop.create_task(self.http.serve(sockets=[self.listener]))
        self.memberships = Memberships(
            self.service, url=self.url, cluster=self.cluster, silent_s=silent_s
        )
        self.membership = loop.create_task(self.memberships.run())

    async def die(self):
        """End at once with all connections, as after kill -9."""
        self.membership.cancel()
        self.engine.die("killed")
        self.http.force_exit = True
        self.http.stop()
        for transport in [c.transport for c in self.http.server_state.connections]:
            transport.abort()
        await self.close()

    async def close(self):
        self.membership.cancel()
        self.http.force_exit = True
        self.http.stop()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self.serving, self.membership, return_exceptions=True)
        self.listener.close()
        self.service.close()
        self.publisher.close()

    async def until_alive(self, count):
        """Wait until the instance has this many sequences."""
        async with asyncio.timeout(60):
            while self.service.live.num_sequences != count:  # noqa: ASYNC110 -- has no event
                await asyncio.sleep(0.01)

    def note_paths(self):
        """Return a list that gets the path of each later request to this instance."""
        app, paths = self.readiness._app, []
        assert app is not None, "an instance that registered has an application"

        async def watch(scope, receive, send):
            paths.append(scope["path"])
            await app(scope, receive, send)

        self.readiness.open(watch)
        return paths

    @property
    def num_steps(self):
        return self.engine.core.stats().num_steps


class Harness:
    """A router, its client, and the started instances."""

    def __init__(self, tokenizer=None, verify=True, **settings):
        defaults: dict[str, Any] = {"port": 0, "peer_token": TOKEN, "heartbeat_s": 0.05}
        # Long: on a busy machine heartbeats come late. Tests of lost instances use `QUICK_LOSS`.
        config = RouterConfig(**defaults | {"stale_s": 60.0, "forget_s": 120.0} | settings)
        self.listener = bind(config.host, config.port)
        self.url = url_of(self.listener, tls=config.tls is not None)
        self.process = RouterProcess(config, self.listener, tokenizer, lambda url: None)
        self.instances = []
        self.client = httpx.AsyncClient(base_url=self.url, timeout=20, verify=verify)

    @staticmethod
    def unix_s():
        """Unix time, as router and instances know it."""
        return unix_s()

    def attach(self, stop):
        """Take the function that stops the router, in place of the signals of a process."""
        self.stop = stop

    def start(self):
        self.running = asyncio.create_task(self.process.run(self))

    def add(self, **settings):
        instance = Instance(self.url, **settings)
        self.instances.append(instance)
        return instance

    async def known(self):
        found = (await self.client.get("/instances")).json()["instances"]
        return {entry["instance_id"]: entry for entry in found}

    async def until(self, reached, within_s=60.0):
        """Query the registered instances until `reached(known)`; fails with the last answer."""
        async with asyncio.timeout(within_s):
            while not reached(known := await self.known()):  # noqa: ASYNC110 -- HTTP has none
                await asyncio.sleep(0.01)
        return known

    async def ready(self, *instances):
        """Wait until `instances` are registered and their caches are exactly known."""
        await self.until(
            lambda known: all(
                known.get(entry.name, {}).get("trust") == "exact" for entry in instances
            )
        )

    async def complete(self, **fields):
        body = {"prompt": "hello " * 20, "seed": 7, "max_tokens": 4} | fields
        return await self.client.post("/v1/completions", json=body)

    async def close(self):
        await self.client.aclose()
        for instance in self.instances:
            await instance.close()
        self.stop()
        assert await self.running == 0
        self.listener.close()


def run(scenario, **settings):
    """Run `scenario(harness)` with a router; afterwards everything has ended."""

    async def whole():
        harness = Harness(**settings)
        harness.start()
        try:
            await scenario(harness)
        finally:
            await harness.close()

    asyncio.run(whole())


def events(text):
    """The events of a stream; the last is [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def blocks(known):
    """All blocks that instances reported."""
    return sum(entry["known_blocks"] for entry in known.values())


def text_of(found):
    """For each choice: the text, the role, the finish reason, and its log-probabilities."""
    answers: dict[int, list[Any]] = {}
    for event in found:
        for choice in event["choices"]:
            answer = answers.setdefault(choice["index"], ["", [], [], []])
            part = choice.get("delta") or {"content": choice["text"]}
            answer[0] += part.get("content", "")
            answer[1] += [part["role"]] if "role" in part else []
            answer[2] += [choice["finish_reason"]] if choice["finish_reason"] else []
            logprobs = choice.get("logprobs") or {}
            answer[3] += logprobs.get("content") or logprobs.get("tokens") or []
    return answers
