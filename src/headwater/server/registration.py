"""Keeps an instance registered at its routers: registers, sends heartbeats, and leaves.

Heartbeats are sent while the engine answers. Each router has its own task, so a router that
hangs does not delay the heartbeats to the others. A router that cannot be reached is retried.
When every router refuses the first registration, the instance ends with the message, because a
setting is wrong. Any other refusal is retried with back-off while the instance serves: that
router was restarted with other settings, or belongs to another cluster.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from headwater.config import VERSION as SOFTWARE
from headwater.engine.client import EngineInfo, GetStats
from headwater.errors import ConfigError, EngineDead
from headwater.metrics.rates import ServerRates
from headwater.metrics.stats import EngineStats, HandoffStats
from headwater.server.answers import RouterHealth
from headwater.server.cluster_auth import ClusterAuth
from headwater.server.config import ServerConfig
from headwater.server.errors import ErrorAnswer
from headwater.server.router.protocol import (
    VERSION,
    EventsAddress,
    InstanceLoad,
    InstanceReport,
    Registered,
    Registration,
)
from headwater.server.service import Service

log = logging.getLogger(__name__)

_STATS_TIMEOUT_S = 0.2
_RETRY_S = 1.0
_MAX_BACKOFF_S = 60.0
_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 2.0
_SILENT_S = 60.0
"""An engine that does not answer for this time is assumed to hang; steps are much shorter."""

_MAX_ANSWER_BYTES = 64 * 1024
_REFUSALS = frozenset({400, 401, 403, 409, 413, 415, 421})
"""Statuses of a router that refuses the registration."""


class Memberships:
    """Keeps one instance registered at all its routers: `run` until cancelled, then `leave`."""

    def __init__(
        self,
        service: Service,
        *,
        url: str,
        cluster: ClusterAuth,
        was_accepted: bool = False,
        silent_s: float = _SILENT_S,
    ) -> None:
        """`url` is the address of this instance's HTTP server on this machine. `was_accepted`
        means that an earlier worker of this server was registered already."""
        self._registrars = [
            Registrar(service, router=router, url=url, cluster=cluster, silent_s=silent_s)
            for router in service.config.routers
        ]
        for registrar in self._registrars:
            registrar.was_accepted = was_accepted

    async def run(self) -> None:
        """Send registrations. Raises ConfigError when every router refused the first one."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for registrar in self._registrars:
                    tasks.create_task(registrar.run(self._check_refusal))
        except* ConfigError as errors:
            raise errors.exceptions[0] from None

    async def leave(self) -> None:
        """Ask all routers to send no more requests."""
        await asyncio.gather(*(registrar.leave() for registrar in self._registrars))

    def _check_refusal(self, error: str) -> None:
        """Raise ConfigError when every router has refused."""
        if all(registrar.was_refused for registrar in self._registrars):
            raise ConfigError(error)


class Registrar:
    """Keeps one instance registered at one router."""

    def __init__(
        self,
        service: Service,
        *,
        router: str,
        url: str,
        cluster: ClusterAuth,
        silent_s: float = _SILENT_S,
    ) -> None:
        """`url` is the address of this instance's HTTP server on this machine."""
        self._service = service
        self._silent_s = silent_s
        self._answered_s = service.clock.now()
        self._stats: asyncio.Task[EngineStats] | None = None
        self._router = router.rstrip("/")
        self._url = _external_url(url, service.config, self._router)
        self._name = service.config.instance_name or urlsplit(self._url).netloc
        self._cluster = cluster
        self._on_refusal: Callable[[str], None] = lambda error: None
        self.was_accepted = False
        self.was_refused = False
        """The router refused, and has never accepted."""
        self._backoff_s = _RETRY_S
        self._last = EngineStats()

    async def run(self, on_refusal: Callable[[str], None]) -> None:
        """Send registrations. `on_refusal` gets the message when the router refuses, unless it
        accepted before."""
        self._on_refusal = on_refusal
        async with self._session() as session:
            try:
                while True:
                    pause_s = await self._send(session) if await self._is_alive() else _RETRY_S
                    await asyncio.sleep(pause_s)
            finally:
                if self._stats is not None:
                    self._stats.cancel()

    async def leave(self) -> None:
        """Ask the router to send no more requests."""
        path = f"/instances/{quote(self._name, safe=':')}"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with asyncio.timeout(_LEAVE_TIMEOUT_S), self._session() as session:
                headers = self._cluster.sign("DELETE", path, {})
                await session.delete(self._router + path, headers=headers)

    async def _is_alive(self) -> bool:
        """Whether the engine has answered within the last `silent_s` seconds. For an engine
        that hangs no heartbeats are sent, so its requests move to other instances."""
        now = self._service.clock.now()
        if self._service.engine.dead is not None:
            return False  # the next engine has another epoch, and registers
        if self._stats is None:
            self._stats = asyncio.create_task(self._service.engine.control(GetStats()))
        await asyncio.wait({self._stats}, timeout=_STATS_TIMEOUT_S)
        if self._stats.done():
            done, self._stats = self._stats, None
            with contextlib.suppress(EngineDead):
                self._last = done.result()
                self._answered_s = now
        return now - self._answered_s <= self._silent_s

    async def _send(self, session: aiohttp.ClientSession) -> float:
        """Send one registration or heartbeat; return the seconds until the next."""
        body = msgspec.json.encode(self._registration())
        headers = {"content-type": "application/json"}
        try:
            async with session.post(
                f"{self._router}/instances",
                data=body,
                headers=self._cluster.sign("POST", "/instances", headers, body),
                allow_redirects=False,
            ) as answer:
                raw = await answer.content.read(_MAX_ANSWER_BYTES)
                if answer.status in _REFUSALS:
                    return self._refused(answer.status, _message(raw))
                answer.raise_for_status()
                heartbeat_s = msgspec.json.decode(raw, type=Registered).heartbeat_s
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as exc:
            return self._retry(f"{type(exc).__name__}: {exc}", _RETRY_S)
        self.was_accepted, self.was_refused = True, False
        self._backoff_s = _RETRY_S
        before = self._service.router_health.get(self._router)
        if before is None or not before.registered:
            log.info("registered: router=%s", self._router)
        self._report(RouterHealth(url=self._router, registered=True))
        return heartbeat_s

    def _refused(self, status: int, message: str) -> float:
        if not self.was_accepted:
            self.was_refused = True
            self._on_refusal(f"the router {self._router} refuses this instance: {message}")
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
        return self._retry(f"status {status}: {message}", self._backoff_s)

    def _retry(self, error: str, pause_s: float) -> float:
        before = self._service.router_health.get(self._router)
        if before is None or before.registered or before.error != error[:500]:
            log.warning("heartbeat failed: router=%s error=%s", self._router, error)
        self._report(RouterHealth(url=self._router, registered=False, error=error[:500]))
        return pause_s

    def _report(self, health: RouterHealth) -> None:
        if health != self._service.router_health.get(self._router):
            self._service.router_health[self._router] = health
            self._service.shared.set_router_health(health)

    def _registration(self) -> Registration:
        service, info = self._service, self._service.engine.info
        return Registration(
            version=VERSION,
            instance_id=self._name,
            epoch=info.epoch,
            role=info.role,  # type: ignore[arg-type]  # one of the three, as the flag was
            url=self._url,
            peer_address=info.peer_address,
            model=service.model_name,
            fingerprint=info.fingerprint,
            kv_format=info.kv_format,
            block_tokens=info.block_tokens,
            capacity_tokens=(info.num_device_blocks + info.num_host_blocks) * info.block_tokens,
            max_model_len=info.max_model_len,
            kv_events=_events(info),
            load=_load_of(self._last),
            report=_report_of(self._last, service.last_minute),
            software=SOFTWARE,
            is_draining=service.is_stopping,
        )

    def _session(self) -> aiohttp.ClientSession:
        tls = self._service.config.tls
        return aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            connector=aiohttp.TCPConnector(ssl=True if tls is None else tls.client_context()),
        )


def _load_of(stats: EngineStats) -> InstanceLoad:
    """The load of the engine, which all workers share."""
    return InstanceLoad(
        running=stats.num_running,
        waiting=stats.num_waiting,
        leases=sum(side.in_flight for side in stats.handoffs.values()),
    )


def _report_of(stats: EngineStats, minute: ServerRates | None) -> InstanceReport:
    """What the router's page shows of this instance; `minute` has its rates."""
    none = HandoffStats()
    sent, received = stats.handoffs.get("prefill", none), stats.handoffs.get("decode", none)
    handoffs = InstanceReport(
        sent_handoffs=sent.done,
        sent_bytes=sent.num_bytes,
        received_handoffs=received.done,
        received_bytes=received.num_bytes,
        failed_handoffs=sum(sent.failures.values()) + sum(received.failures.values()),
    )
    if minute is None:
        return handoffs
    ttft, itl = minute.ttft, minute.itl
    return msgspec.structs.replace(
        handoffs,
        output_tokens_s=minute.output_tokens,
        prompt_tokens_s=minute.prompt_tokens,
        hit_share=minute.hit_share,
        ttft_p50_s=None if ttft is None else ttft.p50_s,
        ttft_p99_s=None if ttft is None else ttft.p99_s,
        itl_p50_s=None if itl is None else itl.p50_s,
        itl_p99_s=None if itl is None else itl.p99_s,
    )


def _events(info: EngineInfo) -> EventsAddress | None:
    if info.kv_events is None:
        return None
    return EventsAddress(
        endpoint=info.kv_events.endpoint,
        replay_endpoint=info.kv_events.replay_endpoint,
        topic=info.kv_events.topic,
        curve=info.kv_events.curve,
    )


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=ErrorAnswer).error.message
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")


def _external_url(url: str, config: ServerConfig, router: str) -> str:
    """`url` as the router can reach it: a wildcard address is replaced by the address from
    which this machine reaches the router."""
    if config.host not in ("0.0.0.0", "::"):
        return url
    place = urlsplit(router)
    family = socket.AF_INET6 if config.host == "::" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as facing:
        try:
            facing.connect((place.hostname or "", place.port or 80))  # UDP: sends no packet
            host = facing.getsockname()[0]
        except OSError:
            return url
    host = f"[{host}]" if ":" in host else host
    parts = urlsplit(url)
    return f"{parts.scheme}://{host}:{parts.port}"
