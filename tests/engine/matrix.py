"""Engines on each storage backend, with separate media, for fault tests."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headwater.clock import SystemClock
from headwater.storage import Opening, StorageBackend, StorageStats, open_storage
from headwater.storage.breaker import BreakerConfig
from headwater.storage.guard import GuardedStorage
from headwater.testing.faults import Fault, FaultyStorage, Medium
from headwater.testing.media import FileMedium, MemoryMedium, MooncakeMedium, RedisMedium
from headwater.testing.tiers import (
    EchoTiers,
    echo_format,
    make_echo_request,
    uncached_tokens,
)
from tests.storage.conftest import MooncakeMaster, RedisServer

BLOCK_TOKENS = 4
PROMPT = [at * 3 % 50 for at in range(33)]
OTHER = [at * 7 % 50 for at in range(29)]
STUCK_S = 20.0
SHORT_S = 0.3
"""Timeout of a call whose fault is that it does not return."""
BACKENDS = ("memory", "file", "redis", pytest.param("mooncake", marks=pytest.mark.slow))
LINKS = {"contains": "lookup", "read": "storage_to_host", "write": "host_to_storage"}


@dataclass
class Bench:
    """One backend on its own medium, and its engines."""

    name: str
    settings: dict[str, Any]
    stop: Callable[[], None]
    """Kill the server of the medium."""

    engines: list[EchoTiers] = field(default_factory=list)

    def open(self, block_tokens: int = BLOCK_TOKENS) -> StorageBackend:
        opening = Opening(format=echo_format(block_tokens))
        return open_storage(self.name, self.settings, opening)

    def medium(self, backend: Any) -> Medium:
        prefix = "headwater:"
        if self.name == "memory":
            return MemoryMedium(backend)
        if self.name == "file":
            return FileMedium(Path(self.settings["path"]))
        if self.name == "redis":
            return RedisMedium(self.settings["url"], prefix)
        return MooncakeMedium(backend._store, prefix)

    def engine(
        self,
        storage: StorageBackend,
        block_tokens: int = BLOCK_TOKENS,
        timeout_s: float = SHORT_S,
        hung: str = "",
        host_blocks: int = 256,
        breaker: BreakerConfig | None = None,
    ) -> EchoTiers:
        """An engine that writes everything it computes and always loads what it finds.

        With `hung` only that call has the timeout; the others may be slow on a busy machine.
        """
        guarded = GuardedStorage(storage, breaker or BreakerConfig(), SystemClock())
        engine = EchoTiers(
            num_blocks=64,
            host_blocks=host_blocks,
            block_tokens=block_tokens,
            storage=guarded,
            timeouts={
                f"{name}_timeout_s": timeout_s if hung in ("", call) else STUCK_S
                for name, call in (("read", "read"), ("write", "write"), ("lookup", "contains"))
            },
            settings={"load_policy": "wait"},
        )
        self.engines.append(engine)
        return engine


def open_bench(name: str, folder: Path) -> Iterator[Bench]:
    settings: dict[str, Any] = {}
    stop: Callable[[], None] = lambda: None  # noqa: E731 - nothing to stop
    if name == "file":
        settings = {"path": str(folder), "slab_bytes": 8 << 20, "reserve_bytes": 0}
    elif name == "redis":
        server = RedisServer(folder)
        settings, stop = {"url": server.url}, server.stop
    elif name == "mooncake":
        master = MooncakeMaster()
        settings, stop = {"master": master.address, "segment_bytes": 1 << 26}, master.stop
    bench = Bench(name, settings, stop)
    yield bench
    for engine in bench.engines:
        engine.core.close()
    stop()


def serve(engine: EchoTiers, salt: str, name: str, prompt: list[int]) -> None:
    """Serve, and compare the output with an uncached run."""
    request = make_echo_request(name, prompt, max_tokens=4, cache_salt=salt)
    engine.run(request, within_s=STUCK_S)
    assert engine.outputs[name] == uncached_tokens(request)


def stored(bench: Bench, backend: StorageBackend, salt: str) -> None:
    """Let another engine write the blocks of PROMPT."""
    writer = bench.engine(backend, timeout_s=STUCK_S)
    serve(writer, salt, "writer", PROMPT)
    writer.core.drain(STUCK_S)
    writer.check_idle()


def finish(engine: EchoTiers) -> None:
    engine.core.drain(STUCK_S)
    engine.check_idle()


class KilledAt(FaultyStorage):
    """Calls `kill` at the first call of a given name."""

    def __init__(self, backend: StorageBackend, call: str, kill: Callable[[], None]) -> None:
        super().__init__(backend, {})
        self._call = call
        self._kill = kill

    def _next(self, name: str) -> Fault | None:
        if name == self._call:
            self._call = ""
            self._kill()
        return None


def storage_of(engine: EchoTiers) -> StorageStats:
    stats = engine.core.stats().storage
    assert stats is not None
    return stats


def kill_victim(bench: Bench, num_lines: int) -> None:
    """Start an engine on the medium and kill it with SIGKILL while it writes."""
    command = [sys.executable, "-m", "tests.engine.victim"]
    with subprocess.Popen(
        [*command, bench.name, json.dumps(bench.settings)], stdout=subprocess.PIPE
    ) as victim:
        assert victim.stdout is not None
        lines = [victim.stdout.readline() for _ in range(num_lines)]
        victim.send_signal(signal.SIGKILL)
    assert all(lines), "it ended by itself"
