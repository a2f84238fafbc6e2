"""The fault matrix: every fault of storage on every backend, under the whole engine.

In each cell the tokens are those of an uncached run, every request ends, every slot is
returned, and the fault is counted by its reason.
"""

from pathlib import Path

import numpy as np
import pytest

from headwater.cache.pool import SlotState
from headwater.storage import StorageBackend
from headwater.storage.breaker import BreakerConfig
from headwater.testing.faults import BYTE_FAULTS, Fault, FaultyStorage
from headwater.testing.media import RedisMedium
from headwater.testing.tiers import uncached_tokens
from tests.engine.matrix import (
    BACKENDS,
    LINKS,
    OTHER,
    PROMPT,
    SHORT_S,
    STUCK_S,
    Bench,
    KilledAt,
    finish,
    kill_victim,
    open_bench,
    serve,
    storage_of,
    stored,
)
from tests.engine.victim import BLOCK_TOKENS as VICTIM_TOKENS
from tests.engine.victim import make_victim_request
from tests.storage.conftest import RedisServer

CALL_FAULTS = {Fault.ERROR: "error", Fault.TIMEOUT: "timeout", Fault.HANG: "timeout"}
DAMAGE = {
    Fault.TRUNCATED: {"bad_length", "bad_checksum", "bad_header", "truncated"},
    Fault.FLIPPED_BIT: {"bad_checksum"},
    Fault.SWAPPED: {"other_key"},
    Fault.OTHER_MODEL: {"other_model"},
}


def test_without_a_fault_every_backend_hits(bench: Bench, backend: StorageBackend) -> None:
    """In the control cell, the next engine loads what one engine wrote."""
    stored(bench, backend, "control")
    engine = bench.engine(backend, timeout_s=STUCK_S)

    serve(engine, "control", "again", PROMPT)

    assert engine.usages["again"].by_tier["storage"] == 32
    assert engine.failures() == {}
    finish(engine)


@pytest.mark.parametrize("call", list(LINKS))
@pytest.mark.parametrize("fault", list(CALL_FAULTS), ids=lambda fault: fault.name)
def test_a_call_that_fails(
    bench: Bench, backend: StorageBackend, fault: Fault, call: str
) -> None:
    """Lessons 24, 38, 45, 50: an error, a timeout or a hang of any call costs at most a hit; a
    hung call that returns after its deadline writes only to quarantined slots."""
    salt = f"{fault.name} {call}"
    stored(bench, backend, salt)
    double = FaultyStorage(backend, {call: [fault]})
    engine = bench.engine(
        double, timeout_s=SHORT_S if fault is Fault.HANG else STUCK_S, hung=call
    )

    serve(engine, salt, "again", PROMPT)
    serve(engine, salt, "other", OTHER)
    engine.core.drain(1.0 if fault is Fault.HANG else STUCK_S)
    double.release()
    serve(engine, salt, "last", PROMPT)
    finish(engine)

    hit = engine.usages["again"].by_tier["storage"]
    assert hit == (32 if call == "write" else 0)
    reason = CALL_FAULTS[fault]
    assert engine.failures()[LINKS[call]].get(reason) == 1
    counted = storage_of(engine).reasons.get(reason, 0)
    assert counted >= (0 if fault is Fault.HANG else 1)


def test_a_hung_read_writes_late_only_to_quarantined_slots(
    bench: Bench, backend: StorageBackend
) -> None:
    """Lesson 50: other requests have filled all free slots when the read returns. Its bytes
    arrive only in its quarantined slots."""
    stored(bench, backend, "late")
    double = FaultyStorage(backend, {"read": [Fault.HANG]})
    engine = bench.engine(double, hung="read", host_blocks=16)
    serve(engine, "late", "hung", PROMPT)
    for number in range(3):
        serve(engine, "late", f"crowd {number}", [at * (7 + number) % 50 for at in range(33)])
        engine.core.drain(0.3)  # written before the next comes; the hung read goes on
    pool, before = engine.cache._host.pool, engine.slab.rows.copy()
    assert pool.stats().cached > 0
    kept = np.sort(pool.owned(SlotState.QUARANTINED))

    double.release()
    engine.core.drain(STUCK_S)

    written = np.flatnonzero((engine.slab.rows != before).any(axis=1))
    assert pool.stats().free + pool.stats().cached == 16
    assert written.tolist() == kept.tolist()
    assert len(kept) == 8
    finish(engine)


def test_a_hung_write_stores_late_what_it_was_given(
    bench: Bench, backend: StorageBackend
) -> None:
    """Lesson 50: other requests need the slots that the hung write reads; the write still reads
    the same bytes, and a later hit gives the right tokens."""
    double = FaultyStorage(backend, {"write": [Fault.HANG]})
    engine = bench.engine(double, hung="write", host_blocks=8)
    serve(engine, "late write", "first", PROMPT)
    engine.core.drain(1.0)
    for number in range(3):
        crowd = [at * (7 + number) % 50 for at in range(33)]
        serve(engine, "late write", f"crowd {number}", crowd)

    double.release()
    finish(engine)

    other = bench.engine(backend, timeout_s=STUCK_S)
    serve(other, "late write", "again", PROMPT)
    assert other.usages["again"].by_tier["storage"] == 32
    finish(other)


@pytest.mark.parametrize("fault", BYTE_FAULTS, ids=lambda fault: fault.name)
def test_bytes_that_are_not_the_block(
    bench: Bench, backend: StorageBackend, fault: Fault
) -> None:
    """Lesson 44: truncated, flipped, swapped and foreign blocks are never served."""
    salt = fault.name
    stored(bench, backend, salt)
    before = backend.stats().reasons
    medium = bench.medium(backend)
    # A busy machine may be slow to read, which is another fault.
    storage = FaultyStorage(backend, {"read": [fault]}, medium)
    engine = bench.engine(storage, timeout_s=STUCK_S)

    serve(engine, salt, "again", PROMPT)
    finish(engine)
    if isinstance(medium, RedisMedium):
        medium.close()

    after = backend.stats().reasons
    counted = {reason for reason in after if after[reason] > before.get(reason, 0)}
    assert counted
    assert counted <= DAMAGE[fault]
    assert engine.failures()["storage_to_host"] == {"damaged": 1}
    assert engine.usages["again"].miss_reason == "damaged"


def test_a_full_medium(bench: Bench, backend: StorageBackend) -> None:
    """Lesson 24: blocks that do not fit are not written, and not retried endlessly."""
    double = FaultyStorage(backend, {"write": [Fault.REFUSED] * 50})
    engine = bench.engine(double)

    serve(engine, "full", "a", PROMPT)
    serve(engine, "full", "b", PROMPT)
    finish(engine)

    failures = engine.failures()["host_to_storage"]
    assert 1 <= failures["refused"] <= 10
    assert not engine.core.has_work


def test_a_full_disk(tmp_path: Path) -> None:
    """Lesson 24: blocks that do not fit on the disk are not written, and not retried
    endlessly."""
    settings = {"path": str(tmp_path), "slab_bytes": 8 << 20, "reserve_bytes": 1 << 60}
    bench = Bench("file", settings, lambda: None)
    backend = bench.open()
    engine = bench.engine(backend)

    serve(engine, "", "a", PROMPT)
    finish(engine)
    engine.core.close()

    assert engine.failures()["host_to_storage"]["refused"] >= 1
    assert sum(backend.stats().reasons.values()) >= 1


def test_a_full_server(tmp_path: Path) -> None:
    """Lessons 24, 43: a Redis server that may not evict has no memory left; blocks are not
    written, and not retried endlessly."""
    server = RedisServer(tmp_path, "--maxmemory", "100kb", "--maxmemory-policy", "noeviction")
    bench = Bench("redis", {"url": server.url}, server.stop)
    backend = bench.open()
    engine = bench.engine(backend)

    serve(engine, "", "a", PROMPT)
    serve(engine, "", "b", PROMPT)
    finish(engine)
    engine.core.close()
    server.stop()

    assert engine.failures()["host_to_storage"]["refused"] >= 1
    assert backend.stats().reasons["no_room"] >= 1


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("redis", "contains"),
        ("redis", "read"),
        # Only once, because its client takes long to leave a master that is gone.
        pytest.param("mooncake", "read", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_is_killed(name: str, call: str, tmp_path: Path) -> None:
    """Lessons 38, 45: the server is killed before the lookup, or between lookup and read: only
    the hit is lost, in bounded time."""
    for bench in open_bench(name, tmp_path):
        backend = bench.open()
        stored(bench, backend, "killed")
        engine = bench.engine(KilledAt(backend, call, bench.stop))

        serve(engine, "killed", "again", PROMPT)
        serve(engine, "killed", "other", OTHER)
        finish(engine)

        assert engine.failures()[LINKS[call]]
        assert engine.usages["again"].by_tier["storage"] == 0


def test_a_server_that_stands_still(tmp_path: Path) -> None:
    """Lessons 38, 45: connections stay open but nothing answers. Calls end at their deadlines,
    and requests end with the right tokens; when the server continues, it is used again."""
    server = RedisServer(tmp_path)
    bench = Bench("redis", {"url": server.url}, server.stop)
    backend = bench.open()
    stored(bench, backend, "still")
    waits = BreakerConfig(recovery_s=0.05, max_recovery_s=0.1)
    engine = bench.engine(backend, breaker=waits)

    server.pause()
    serve(engine, "still", "paused", PROMPT)
    serve(engine, "still", "other", OTHER)
    server.go_on()
    other = bench.engine(backend, timeout_s=STUCK_S)
    serve(other, "still", "again", PROMPT)
    for done in (engine, other):
        finish(done)
        done.core.close()
    server.stop()

    assert engine.usages["paused"].by_tier["storage"] == 0
    assert engine.failures()["lookup"]["timeout"] >= 1
    assert other.usages["again"].by_tier["storage"] == 32


def test_a_server_that_comes_back_is_found_again(tmp_path: Path) -> None:
    """Lesson 45: after three failures a lost server is not called; when it is back, one trial
    call closes the breaker, and the next engine hits what was written since."""
    server = RedisServer(tmp_path)
    bench = Bench("redis", {"url": server.url}, server.stop)
    backend, waits = bench.open(), BreakerConfig(recovery_s=0.05, max_recovery_s=0.1)
    engine = bench.engine(backend, breaker=waits, timeout_s=STUCK_S)
    server.stop()
    for number in range(4):
        serve(engine, f"gone {number}", f"gone {number}", PROMPT)
        assert engine.usages[f"gone {number}"].miss_reason == "storage_failed"
    assert storage_of(engine).breaker != "closed"
    assert storage_of(engine).reasons["error"] >= 3

    server.start()
    for number in range(1000):
        storage = storage_of(engine)
        if storage.breaker == storage.write_breaker == "closed":
            break
        serve(engine, f"back {number}", f"back {number}", PROMPT)
    serve(engine, "back", "back", PROMPT)
    finish(engine)
    other = bench.engine(backend, breaker=waits, timeout_s=STUCK_S)
    serve(other, "back", "again", PROMPT)

    assert storage_of(engine).recoveries >= 1
    assert storage_of(engine).reasons["breaker_open"] >= 1
    assert other.usages["again"].by_tier["storage"] == 32
    finish(other)
    for done in (engine, other):
        done.core.close()
    server.stop()


@pytest.mark.parametrize("name", BACKENDS[1:])
def test_an_engine_that_is_killed_while_it_writes(name: str, tmp_path: Path) -> None:
    """Lesson 44: after kill -9 other engines find complete blocks or none, and give the right
    tokens."""
    for bench in open_bench(name, tmp_path):
        for num_lines in (1, 3):
            kill_victim(bench, num_lines)
            backend = bench.open(VICTIM_TOKENS)
            engine = bench.engine(backend, VICTIM_TOKENS)
            for number in range(4):
                request = make_victim_request(number)
                engine.run(request, within_s=STUCK_S)
                assert engine.outputs[request.request_id] == uncached_tokens(request)
            finish(engine)
            engine.core.close()
