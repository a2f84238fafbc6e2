"""An instance at its router: registers, says every second that it lives, and leaves.

It lives while its engine answers; this process alone can serve nobody.
A router that is not there is no reason to stop: it is asked again until it is. A router that
refuses, because this instance serves something else, is.
"""

import asyncio
import contextlib
import logging
import socket
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from headwater.config import ServerConfig
from headwater.engine.client import EngineInfo, GetStats
from headwater.errors import ConfigError, EngineDead
from headwater.metrics.stats import EngineStats
from headwater.server.errors import ErrorAnswer
from headwater.server.router.protocol import (
    TOKEN_HEADER,
    VERSION,
    EventsAddress,
    InstanceLoad,
    Registered,
    Registration,
)
from headwater.server.service import Service

log = logging.getLogger(__name__)

_LOOK_TIMEOUT_S = 0.2
_RETRY_S = 1.0
_TIMEOUT_S = 5.0
_LEAVE_TIMEOUT_S = 2.0
_SILENT_S = 60.0
"""An engine that says nothing for so long hangs: no step should take that long."""

_REFUSALS = frozenset({400, 403, 409})
"""Answers that trying again does not change."""


class Registrar:
    """Keeps one instance registered; `run` until it is cancelled, then `leave`."""

    def __init__(
        self, service: Service, *, router: str, url: str, silent_s: float = _SILENT_S
    ) -> None:
        """`url` is where this instance's HTTP is, seen from here."""
        self._service = service
        self._silent_s = silent_s
        self._heard_s = service.clock.now()
        self._look: asyncio.Task[EngineStats] | None = None
        self._router = router.rstrip("/")
        self._url = _seen_from_outside(url, service.config, self._router)
        self._name = urlsplit(self._url).netloc
        token = service.config.peer_token
        self._headers = {} if token is None else {TOKEN_HEADER: token}
        self._is_known = False
        self._num_leases = 0

    async def run(self) -> None:
        """Register and renew; raises ConfigError with the router's sentence when it refuses."""
        async with self._session() as session:
            try:
                while self._service.engine.dead is None:
                    pause_s = await self._renew(session) if await self._answers() else _RETRY_S
                    await asyncio.sleep(pause_s)
            finally:
                if self._look is not None:
                    self._look.cancel()

    async def leave(self) -> None:
        """Tell the router to send nothing more."""
        where = f"{self._router}/instances/{quote(self._name, safe=':')}"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with asyncio.timeout(_LEAVE_TIMEOUT_S), self._session() as session:
                await session.delete(where, headers=self._headers)

    async def _answers(self) -> bool:
        """Whether the engine has said something lately. In a long step it does not, and is not
        waited for; in one without an end it is as good as dead, and its requests are better off
        elsewhere."""
        now = self._service.clock.now()
        if self._look is None:
            self._look = asyncio.create_task(self._service.engine.control(GetStats()))
        await asyncio.wait({self._look}, timeout=_LOOK_TIMEOUT_S)
        if self._look.done():
            look, self._look = self._look, None
            with contextlib.suppress(EngineDead):
                sides = look.result().handoffs.values()
                self._num_leases = sum(side.in_flight for side in sides)
                self._heard_s = now
        return now - self._heard_s <= self._silent_s

    async def _renew(self, session: aiohttp.ClientSession) -> float:
        """One heartbeat; seconds until the next."""
        try:
            async with session.post(
                f"{self._router}/instances",
                data=msgspec.json.encode(self._registration()),
                headers=self._headers,
            ) as answer:
                body = await answer.read()
                if answer.status in _REFUSALS:
                    raise ConfigError(
                        f"the router {self._router} refuses this instance: {_why(body)}"
                    )
                answer.raise_for_status()
                told = msgspec.json.decode(body, type=Registered)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as exc:
            if self._is_known:
                log.warning("the router %s does not answer: %s", self._router, exc)
            self._is_known = False
            return _RETRY_S
        self._is_known = True
        return told.heartbeat_s

    def _registration(self) -> Registration:
        service, info = self._service, self._service.engine.info
        alive = service.live.num_sequences
        running = min(alive, info.max_num_seqs)
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
            load=InstanceLoad(
                running=running, waiting=alive - running, leases=self._num_leases
            ),
            is_draining=service.is_stopping,
        )

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))


def _events(info: EngineInfo) -> EventsAddress | None:
    if info.kv_events is None:
        return None
    return EventsAddress(
        endpoint=info.kv_events.endpoint,
        replay_endpoint=info.kv_events.replay_endpoint,
        topic=info.kv_events.topic,
    )


def _why(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=ErrorAnswer).error.message
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")


def _seen_from_outside(url: str, config: ServerConfig, router: str) -> str:
    """`url` as the router can use it: a server on every address says the one that faces it."""
    if config.host not in ("0.0.0.0", "::"):
        return url
    place = urlsplit(router)
    family = socket.AF_INET6 if config.host == "::" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as facing:
        try:
            facing.connect((place.hostname or "", place.port or 80))  # sends nothing
            host = facing.getsockname()[0]
        except OSError:
            return url
    host = f"[{host}]" if ":" in host else host
    return f"http://{host}:{urlsplit(url).port}"
