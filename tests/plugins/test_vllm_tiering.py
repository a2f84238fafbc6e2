"""The tier and the policy under vLLM's own tiering manager, with the faults that storage can have.

Only where vLLM is installed; scripts/test-plugins does that. The primary view is ordinary memory: what
a GPU would store is written into its rows, and every row that is loaded is compared.
"""

import hashlib
import os
import subprocess
import sys
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

from tests.plugins.backends import SHARED, damage_slabs, end_hanging_calls
from tests.plugins.doubles.finder import is_real
from tests.storage.conftest import RedisServer
from tests.waiting import until

pytestmark = pytest.mark.skipif(not is_real("vllm"), reason="vllm is not installed")

BYTES = 8192


def make_config(model):
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("l0", "l1"), 0),),
        worker_kv_bytes_per_block=BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="test",
        model=OffloadingModelConfig(str(model), "bfloat16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout="NHD",
    )


def content(key):
    """What a GPU would have computed for a chunk."""
    seed = int.from_bytes(key[:8], "big")
    return np.random.default_rng(seed).integers(0, 256, BYTES, dtype=np.uint8)


def make_keys(count, run="run"):
    from vllm.v1.kv_offload.base import make_offload_key

    hashes = [hashlib.sha256(f"{run} {n}".encode()).digest() for n in range(count)]
    return [make_offload_key(one, 0) for one in hashes]


class Server:
    """vLLM's manager with its CPU tier, Headwater's policy and Headwater's tier."""

    def __init__(self, model, num_chunks=16, **tier):
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
        from vllm.v1.kv_offload.tiering.manager import (
            CPUPrimaryTierOffloadingManager,
            TieringOffloadingManager,
        )

        self.rows = np.zeros((num_chunks, BYTES), np.uint8)
        region = SimpleNamespace(
            create_kv_memoryview=lambda: self.rows.data, cleanup=lambda: None
        )
        primary = CPUPrimaryTierOffloadingManager(
            num_chunks, region, "SessionCachePolicy", "headwater.plugins.vllm.policy"
        )
        events = SimpleNamespace(enable_kv_cache_events=False, self_describing_kv_events=False)
        spec = SimpleNamespace(
            config=make_config(model), blocks_per_chunk=1, kv_events_config=events
        )
        names = {"type": "HeadwaterTier", "module_path": "headwater.plugins.vllm.tier"}
        secondary = SecondaryTierFactory.create_secondary_tier(
            {**names, **tier}, primary.get_kv_memoryview(), spec
        )
        self.manager = TieringOffloadingManager(primary, [secondary])

    def step(self):
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def serve(self, name, keys):
        """Serve one request like vLLM's scheduler; return how many chunks were found, all of them
        correct."""
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        context = ReqContext(name)
        for place, key in enumerate(keys):
            context.set_offload_key_position(key, 16 * (place + 1))
        self.manager.on_new_request(context)
        found: list[bytes] = []

        def is_known():
            found.clear()
            for key in keys:
                answer = self.manager.lookup(key, context)
                if answer is LookupResult.MISS:
                    break
                if answer is not LookupResult.HIT:
                    self.step()
                    return False
                found.append(key)
            return True

        until(is_known, within_s=60)
        if found:
            spec = self.manager.prepare_load(found, context)
            for key, chunk in zip(found, spec.chunk_ids, strict=True):
                assert np.array_equal(self.rows[chunk], content(key)), "a wrong chunk"
            self.manager.complete_load(found, context)
        output = self.manager.prepare_store(keys, context)
        if output is not None and output.keys_to_store:
            chunks = output.store_spec.chunk_ids
            for key, chunk in zip(output.keys_to_store, chunks, strict=True):
                self.rows[chunk] = content(key)
            self.manager.complete_store(output.keys_to_store, context)
        self.manager.on_request_finished(context)
        self.step()
        return len(found)

    def drain(self):
        until(
            lambda: [self.step(), not self.manager.has_pending_work()][1],
            within_s=60,
        )

    def close(self):
        for tier in self.manager.secondary_tiers:
            tier.shutdown()


@pytest.fixture
def start(model):
    servers = []
    SHARED.clear()

    def make(**tier):
        servers.append(Server(model, **tier))
        return servers[-1]

    yield make
    end_hanging_calls()
    for server in servers:
        server.close()


def in_files(folder, **settings):
    config = {"path": str(folder), "capacity_bytes": "64MiB", "slab_bytes": "4MiB"}
    return {"backend": "file", "config": {**config, **settings}}


def in_memory():
    return {"backend": "tests.plugins.backends:SharedMemory", "config": {"name": "store"}}


def test_chunks_come_back_cold_warm_evicted_restarted_and_in_a_second_instance(start, tmp_path):
    """Chunks come from the CPU tier, then from storage after other prompts took their place,
    then in another process."""
    first = start(**in_files(tmp_path / "kv"))
    keys = make_keys(8)

    cold, warm = first.serve("cold", keys), first.serve("warm", keys)
    first.drain()
    for n in range(4):
        first.serve(f"other {n}", make_keys(8, f"other {n}"))
        first.drain()
    evicted = first.serve("evicted", keys)
    second = start(**in_files(tmp_path / "kv")).serve("second", keys)

    assert (cold, warm, evicted, second) == (0, 8, 8, 8)


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_files_never_give_a_wrong_chunk(start, tmp_path, damage):
    """`serve` compares every chunk that it is given."""
    first = start(**in_files(tmp_path / "kv"))
    keys = make_keys(8)
    first.serve("cold", keys)
    first.drain()
    first.close()
    damage_slabs(tmp_path / "kv", damage)

    assert start(**in_files(tmp_path / "kv")).serve("after", keys) < 8


def test_a_full_disk_refuses_chunks_and_nothing_else(start, tmp_path):
    """On a file system of 1 MiB stores fail, and requests continue."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = "size=1m,mode=0700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        server = start(**in_files(folder, reserve_bytes=0, slab_bytes="512KiB"))
        for n in range(6):
            assert server.serve(str(n), make_keys(16, f"run {n}")) == 0
            server.drain()
        server.close()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_storage_that_hangs_is_a_miss_and_serves_again_later(start):
    """Lookups and loads end at their deadlines; the step never waits."""
    first = start(**in_memory())
    keys = make_keys(8)
    first.serve("cold", keys)
    first.drain()
    second = start(**in_memory(), lookup_timeout_s=0.1, read_timeout_s=0.1)
    store = SHARED["store"]
    store.hang = Event()

    assert second.serve("hangs", make_keys(8, "new")) == 0
    store.hang.set()
    store.hang = None
    second.drain()
    assert second.serve("again", make_keys(8, "new")) == 8


def test_a_redis_that_stops_is_a_miss(start, tmp_path):
    """The Redis server answers, is stopped with SIGSTOP, then is killed."""
    redis = RedisServer(tmp_path)
    tier = {
        "backend": "redis",
        "config": {"url": redis.url},
        "lookup_timeout_s": 0.5,
        "read_timeout_s": 0.5,
        "write_timeout_s": 1.0,
    }
    try:
        first = start(**tier)
        keys = make_keys(8)
        first.serve("cold", keys)
        first.drain()
        second = start(**tier)
        assert second.serve("shared", keys) == 8
        redis.pause()
        assert second.serve("stopped", make_keys(8, "stopped")) == 0
        redis.stop()
        assert second.serve("killed", make_keys(8, "killed")) == 0
    finally:
        redis.stop()


def test_after_kill_9_while_storing_only_whole_chunks_are_found(start, model, tmp_path):
    """Another process stores without end and is killed; the next one compares what it finds."""
    code = (
        "import sys; from tests.plugins.test_vllm_tiering import *\n"
        "server = Server(sys.argv[1], **in_files(sys.argv[2]))\n"
        "for n in range(10_000):\n"
        "    server.serve(str(n), make_keys(8, f'run {n}')); server.step()\n"
        "    print(n, flush=True)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(model), str(tmp_path / "kv")]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        while (line := child.stdout.readline()) != "20\n":
            assert child.poll() is None, line
        child.kill()

    after = start(**in_files(tmp_path / "kv"))
    found = [after.serve(f"after {n}", make_keys(8, f"run {n}")) for n in range(21)]

    assert sum(found) > 0
