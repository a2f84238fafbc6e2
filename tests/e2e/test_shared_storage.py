"""Servers that share storage: each hits what the others wrote, also after a restart."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.live import LiveServer
from tests.e2e.test_tiers import ask, until_written
from tests.storage.conftest import MooncakeLender, MooncakeMaster, RedisServer

pytestmark = pytest.mark.slow


def start(backend: str, settings: dict[str, Any]) -> LiveServer:
    """A server that writes all it computes to `backend`."""
    return LiveServer(
        *("--swap-space", "0.25", "--write-policy", "write_through"),
        *("--load-policy", "wait", "--kvcache-storage-backend", backend),
        *("--kvcache-storage-config", json.dumps(settings)),
    )


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster()
    yield master
    master.stop()


def test_two_servers_on_one_mooncake_pool_hit_each_others_prefixes(master: MooncakeMaster):
    """What either server computed, the other loads, with the same tokens, and does not write
    again (lesson 40)."""
    settings = {"master": master.address, "segment_bytes": "64MiB"}
    servers = [start("mooncake", settings) for _ in range(2)]
    first, second = (server.wait_ready() for server in servers)

    ours, cold = ask(first, 1)
    until_written(first, "host_to_storage")
    theirs, warm = ask(second, 1)
    back, cold_too = ask(second, 2)
    written = until_written(second, "host_to_storage")["storage"]["blocks_written"]
    again, warm_too = ask(first, 2)
    codes = [server.stop() for server in servers]

    assert codes == [0, 0], [server.errors for server in servers]
    assert (ours, back) == (theirs, again)
    assert cold["storage"] == cold_too["storage"] == 0
    assert warm["storage"] >= 10 * 64
    assert warm["recomputed"] <= 64
    assert warm_too["storage"] >= 10 * 64
    assert written <= cold_too["recomputed"] // 64 + 1


def test_a_restarted_server_hits_in_a_mooncake_pool_that_stayed(master: MooncakeMaster):
    """A process that stays lends the memory of the pool, so the first request hits."""
    lender = MooncakeLender(master)
    before, after, warm = restart("mooncake", {"master": master.address, "segment_bytes": 0})
    lender.stop()

    assert before == after
    assert warm["storage"] >= 10 * 64


def test_a_restarted_server_hits_on_a_redis_server_that_stayed(tmp_path):
    """The first request after the restart hits, with Redis and with Valkey."""
    redis = RedisServer(tmp_path)
    before, after, warm = restart("redis", {"url": redis.url})
    redis.stop()

    assert before == after
    assert warm["storage"] >= 10 * 64


def restart(backend: str, settings: dict[str, Any]) -> tuple[list[int], list[int], Any]:
    """The tokens before and after a restart, and the source of the first prompt afterwards."""
    server = start(backend, settings).wait_ready()
    before, cold = ask(server, 1)
    until_written(server, "host_to_storage")
    assert server.stop() == 0, server.errors
    assert cold["storage"] == 0

    restarted = start(backend, settings).wait_ready()
    after, warm = ask(restarted, 1)
    assert restarted.stop() == 0, restarted.errors
    return before, after, warm
