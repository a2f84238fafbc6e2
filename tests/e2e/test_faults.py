"""Storage faults under a real server with a real model: clients do not notice them.

The whole matrix is in tests/engine/test_fault_matrix.py, over an engine that echoes. Here the
same faults meet the built-in model, HTTP and /metrics: in each cell the greedy tokens are those
of a server without a cache, the fault is counted by its reason, and every slot is returned.
"""

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.live import LiveServer
from tests.e2e.test_tiers import ask, until_written
from tests.storage.conftest import MooncakeMaster, RedisServer

pytestmark = pytest.mark.slow

LINKS = {"contains": "lookup", "read": "storage_to_host", "write": "host_to_storage"}
CALLS = [
    *((call, fault, fault.lower()) for call in LINKS for fault in ("ERROR", "TIMEOUT")),
    ("write", "REFUSED", "refused"),
]
"""Call, fault, and the reason it is counted under."""

STORABLE_WITHIN_S = 60.0
"""Far more than a pool takes to notice that a member is dead, plus the pause of the breaker."""

DAMAGE = {
    "TRUNCATED": {"bad_length", "bad_checksum", "bad_header", "truncated"},
    "FLIPPED_BIT": {"bad_checksum"},
    "SWAPPED": {"other_key"},
    "OTHER_MODEL": {"other_model"},
}


@dataclass
class Stage:
    """A medium, how to kill its server, and a server of ours that uses it."""

    name: str
    settings: dict[str, Any]
    medium: RedisServer | MooncakeMaster | None
    orders: Path

    def serve(self) -> LiveServer:
        whole = {"backend": self.name, "settings": self.settings, "orders": str(self.orders)}
        return LiveServer(
            *("--swap-space", "0.25", "--write-policy", "write_through"),
            *("--load-policy", "wait", "--kvcache-storage-config", json.dumps(whole)),
            *("--kvcache-storage-backend", "tests.e2e.faulty:OrderedStorage"),
        ).wait_ready()


@pytest.fixture(scope="module", params=["file", "redis", "mooncake"])
def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("medium")
    medium: RedisServer | MooncakeMaster | None = None
    if request.param == "file":
        settings: dict[str, Any] = {"path": str(folder / "blocks"), "reserve_bytes": 0}
        settings |= {"capacity_bytes": "64MiB", "slab_bytes": "16MiB"}
    elif request.param == "redis":
        medium = RedisServer(folder)
        settings = {"url": medium.url}
    else:
        medium = MooncakeMaster()
        settings = {"master": medium.address, "segment_bytes": "64MiB"}
    yield Stage(request.param, settings, medium, folder / "orders")
    if medium is not None:
        medium.stop()


@pytest.fixture(scope="module")
def right() -> Iterator[dict[int, list[int]]]:
    """The tokens of each prompt, from a server that has no cache."""
    server = LiveServer("--no-enable-prefix-caching").wait_ready()
    yield {number: ask(server, number)[0] for number in (1, 2)}
    assert server.stop() == 0, server.errors


@pytest.fixture(scope="module")
def server(stage: Stage, right: dict[int, list[int]]) -> Iterator[LiveServer]:
    """A server on the storage of another one, which was killed in the middle of a write."""
    victim = stage.serve()
    assert ask(victim, 2)[0] == right[2]
    until_written(victim, "host_to_storage")
    stage.orders.write_text("write TORN")
    assert ask(victim, 1)[0] == right[1]
    while not stage.orders.with_suffix(".torn").exists():
        assert victim.process.poll() is None
    os.kill(victim.engine_pid, signal.SIGKILL)
    victim.stop(signal.SIGKILL)

    server = stage.serve()
    yield server
    if stage.medium is not None:
        stage.medium.stop()
        check_served_without_storage(server, right)
    assert server.stop() == 0, server.errors


def check_served_without_storage(server: LiveServer, right: dict[int, list[int]]) -> None:
    """The last cell: the medium's server is killed while we serve."""
    server.post("/reset_prefix_cache")
    for number in (1, 2, 1):
        assert ask(server, number, load_policy="deadline", load_timeout_s=2)[0] == right[number]
    counts = scrape(server)
    assert sum(n for name, n in counts.items() if name[0] == "storage_faults_total") > 0
    check_whole(server)


def scrape(server: LiveServer) -> dict[tuple[str, ...], float]:
    """Every counter of /metrics by name and labels."""
    return {
        (sample.name.removeprefix("headwater:"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
    }


def check_whole(server: LiveServer) -> None:
    """Nothing runs, and nothing is held."""
    tiers = server.until_idle()["tiers"]
    for name in ("device", "host"):
        tier = tiers[name]
        assert tier["free"] + tier["cached"] + tier["held"] == tier["num_blocks"]
    assert tiers["device"]["held"] == 0


def store(server: LiveServer, name: str) -> str:
    """A salt under which all blocks of the first prompt are only in storage.

    A pool offers the memory of a dead member until the member's heartbeats are missed (10 s by
    default); such writes fail, and then the breaker waits before it tries again.
    """
    attempts = itertools.count()
    give_up = time.monotonic() + STORABLE_WITHIN_S
    while time.monotonic() < give_up:
        salt = f"{name} {next(attempts)}"
        before = server.get("/cache").json()["storage"]["blocks_written"]
        _, cache = ask(server, 1, cache_salt=salt)
        after = until_written(server, "host_to_storage")["storage"]["blocks_written"]
        server.post("/reset_prefix_cache")
        if after - before < cache["recomputed"] // 64:
            continue
        # Blocks of an earlier attempt may have been written instead: check.
        _, found = ask(server, 1, cache_salt=salt)
        server.post("/reset_prefix_cache")
        if found["recomputed"] < 64:
            return salt
    raise AssertionError("nothing can be stored")


def meet(
    server: LiveServer, stage: Stage, call: str, fault: str, right: dict[int, list[int]]
) -> dict[tuple[str, ...], float]:
    """Let one call for a stored prefix fail; return what was counted meanwhile."""
    salt = f"{call} {fault}"
    if call != "write":
        salt = store(server, salt)
    before = scrape(server)
    stage.orders.write_text(f"{call} {fault}")
    tokens, _ = ask(server, 1, cache_salt=salt)
    until_written(server, LINKS[call])
    again, _ = ask(server, 1, cache_salt=salt)

    assert not stage.orders.exists(), "the call never came"
    assert tokens == again == right[1]
    check_whole(server)
    after = scrape(server)
    return {name: n - before.get(name, 0.0) for name, n in after.items()}


def test_the_next_server_serves_the_whole_blocks_after_a_torn_write(
    server: LiveServer, stage: Stage, right: dict[int, list[int]]
) -> None:
    """Lessons 40, 44: after kill -9 in the middle of a block, that block is not found, but
    earlier ones are, except in a pool that lost the memory of its dead member."""
    torn, cache = ask(server, 1)
    whole, before = ask(server, 2)

    assert (torn, whole) == (right[1], right[2])
    assert cache["storage"] == 0
    assert (before["storage"] > 0) == (stage.name != "mooncake")
    check_whole(server)


@pytest.mark.parametrize(("call", "fault", "reason"), CALLS)
def test_a_call_that_fails_costs_a_hit_at_most(
    server: LiveServer,
    stage: Stage,
    right: dict[int, list[int]],
    call: str,
    fault: str,
    reason: str,
) -> None:
    """Lessons 24, 38, 45: the client gets the right tokens and no error, and the failure is
    counted by its reason."""
    counted = meet(server, stage, call, fault, right)

    assert counted["transfer_failures_total", *sorted((LINKS[call], reason))] >= 1


@pytest.mark.parametrize("fault", list(DAMAGE))
def test_bytes_that_are_not_the_block_are_not_served(
    server: LiveServer, stage: Stage, right: dict[int, list[int]], fault: str
) -> None:
    """Lesson 44: truncated, flipped, swapped and foreign blocks are detected and counted."""
    counted = meet(server, stage, "read", fault, right)

    faults = {n[1] for n, count in counted.items() if n[0] == "storage_faults_total" and count}
    assert faults & DAMAGE[fault]
    assert faults <= DAMAGE[fault] | {"transfer_failed"}  # to the memory of a dead member
    assert counted["transfer_failures_total", "damaged", "storage_to_host"] == 1


def test_a_hung_read_costs_the_deadline_of_the_request(
    server: LiveServer, stage: Stage, right: dict[int, list[int]]
) -> None:
    """Lessons 38, 50: the client waits until its own deadline, and bytes that arrive later are
    not used."""
    salt = store(server, "hang")
    stage.orders.write_text("read HANG")

    tokens, cache = ask(server, 1, cache_salt=salt, load_policy="deadline", load_timeout_s=0.25)

    assert tokens == right[1]
    assert (cache["storage"], cache["miss_reason"]) == (0, "timeout")
    assert 0.25 <= cache["load"]["waited_s"] < 5.0
