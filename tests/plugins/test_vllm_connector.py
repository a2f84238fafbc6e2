"""The connector: scheduler side and worker side together, over a real KV cache."""

import ctypes
import hashlib
import random
from threading import Event

import numpy as np
import pytest
import torch

from headwater.clock import SystemClock
from headwater.errors import ConfigError
from headwater.plugins.identity import storage_keys
from headwater.plugins.settings import PluginConfig
from headwater.plugins.storage_metrics import sample_writes
from headwater.plugins.vllm.connector_metrics import StatsDelta
from headwater.plugins.vllm.connector_worker import ConnectorWorker
from headwater.plugins.vllm.host_tier import HostTier, HostTierConfig
from headwater.plugins.vllm.messages import OrderEnd, RankReport
from headwater.plugins.vllm.pages import KVPages
from headwater.transfer.slab import PAGE_BYTES, HostSlab
from tests.plugins.backends import SHARED, end_hanging_calls
from tests.waiting import until

TOKENS = 16
IDENTITY = hashlib.sha256(b"identity").digest()


def make_hashes(count, run="run"):
    return [hashlib.sha256(f"{run} {n}".encode()).digest() for n in range(count)]


def content(block_hash, layer):
    """The result of the model for a block: a function of its hash, different for each layer."""
    generator = torch.Generator().manual_seed(int.from_bytes(block_hash[:6], "big") + layer)
    return torch.rand((2, TOKENS, 4), generator=generator)


class Engine:
    """A stand-in for vLLM: its KV cache, its steps, and its reaction to a failed load."""

    def __init__(self, *, num_slots=32, eviction="lru", max_waiting=4096, **settings):
        self.layers = {name: torch.zeros((64, 2, TOKENS, 4)) for name in ("l0", "l1")}
        pages = KVPages(self.layers, 64)
        settings.setdefault("backend", "tests.plugins.backends:SharedMemory")
        settings.setdefault("config", {"name": "store"})
        config = PluginConfig.read(settings, "connector")
        self.worker = ConnectorWorker(pages, num_slots, IDENTITY, config, SystemClock())
        self.tier = HostTier(
            HostTierConfig(
                num_slots=num_slots,
                block_tokens=TOKENS,
                identity=b"scheduler",
                eviction=eviction,
                lookup_timeout_s=config.lookup_timeout_s,
                max_waiting_writes=max_waiting,
            ),
            SystemClock(),
        )
        self.free = list(range(64))
        self.arrived: set[str] = set()
        self.failed: set[int] = set()

    def step(self, *, computes=True):
        """One step of scheduler and worker."""
        orders = self.tier.take_orders()
        orders.computes = computes
        self.worker.start(orders)
        self.worker.save(orders)
        arrivals = self.worker.take_arrivals()
        self.arrived |= arrivals.requests
        self.failed |= arrivals.failed_blocks
        report = self.worker.take_report()
        if report is not None:
            self.tier.receive(report)
        self.tier.check()

    def serve(self, name, hashes):
        """Serve one request; return how many of its blocks were loaded, all of them correct."""
        found = None

        def is_known():
            nonlocal found
            found = self.tier.match(name, hashes, 0)
            self.step()
            return found is not None

        until(is_known)
        blocks = [self.free.pop() for _ in hashes]
        loaded = 0
        if found:
            self.tier.load(name, hashes[:found], 0, blocks[:found])
            until(lambda: [self.step(), name in self.arrived][1])
            loaded = next((i for i, b in enumerate(blocks[:found]) if b in self.failed), found)
        for block_hash, block in list(zip(hashes, blocks, strict=True))[loaded:]:
            for number, layer in enumerate(self.layers.values()):
                layer[block] = content(block_hash, number)
        self.tier.save(name, hashes, blocks)
        self.step()
        for block_hash, block in zip(hashes, blocks, strict=True):
            for number, layer in enumerate(self.layers.values()):
                assert torch.equal(layer[block], content(block_hash, number)), "a wrong block"
        self.tier.finish(name, len(hashes) * TOKENS, 0)
        self.step()
        self.free += blocks
        self.failed -= set(blocks)
        for block in blocks:
            for layer in self.layers.values():
                layer[block] = -1
        return loaded

    def drain(self):
        until(lambda: [self.step(), not self.tier.has_work][1])


@pytest.fixture
def make_engine():
    engines = []
    SHARED.clear()

    def make(**settings):
        engines.append(Engine(**settings))
        return engines[-1]

    yield make
    end_hanging_calls()
    for engine in engines:
        engine.worker.close()


def test_host_memory_is_allocated_at_the_start(make_engine):
    """Copies after a step do not wait until the system has allocated and cleared their pages."""
    memory = np.frombuffer(make_engine(num_slots=512).worker.slab.memory, dtype=np.uint8)
    present = (ctypes.c_ubyte * -(-len(memory) // PAGE_BYTES))()
    address = ctypes.c_void_p(memory.ctypes.data)
    refused = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(memory)), present)

    assert not refused
    assert all(page & 1 for page in present)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_block_that_vllm_divides_for_its_kernel_moves_whole(rows):
    """With --block-size 128 and a kernel for 64 tokens, vLLM's tensors have two rows for each KV
    block, and its block numbers still count KV blocks."""
    layers = {name: torch.rand((4 * rows, 2, TOKENS // rows, 4)) for name in ("l0", "l1")}
    before = {name: layer.clone() for name, layer in layers.items()}
    pages = KVPages(layers, 4)
    pages.bind(HostSlab(2, pages.block_bytes))

    pages.save([1, 3], [0, 1])
    for layer in layers.values():
        layer.zero_()
    pages.load([1, 0], [0, 2])

    assert pages.block_bytes == 2 * 2 * TOKENS * 4 * 4
    for name, layer in layers.items():
        blocks, old = layer.view(4, -1), before[name].view(4, -1)
        assert torch.equal(blocks[0], old[3])
        assert torch.equal(blocks[2], old[1])
        assert not blocks[1].any()
        assert not blocks[3].any()


def test_a_kv_cache_with_another_number_of_blocks_is_refused():
    """Rows of such a KV cache would be those of other blocks."""
    with pytest.raises(ConfigError, match="is not the 4 KV blocks"):
        KVPages({"l0": torch.zeros((6, 2, TOKENS, 4))}, 4)


@pytest.mark.parametrize("eviction", ["lru", "session"])
def test_blocks_come_back_from_the_host_tier(make_engine, eviction):
    """At first nothing is found, then everything, then the shared part of another prompt."""
    engine = make_engine(eviction=eviction)
    hashes = make_hashes(8)

    assert engine.serve("cold", hashes) == 0
    assert engine.serve("warm", hashes) == 8
    assert engine.serve("shared", [*hashes[:5], *make_hashes(3, "other")]) == 5


def test_a_second_instance_finds_the_blocks_of_the_first_in_storage(make_engine):
    """Blocks that the first instance's host tier has evicted since are found too."""
    first = make_engine(num_slots=16)
    hashes = make_hashes(12)
    first.serve("cold", hashes)
    first.drain()
    first.serve("other", make_hashes(12, "other"))
    first.drain()

    assert make_engine().serve("second", hashes) == 12
    assert first.serve("again", hashes) == 12


def test_a_damaged_block_is_computed_and_what_follows_it_too(make_engine):
    """Blocks before the damaged one are loaded; no wrong byte reaches the KV cache."""
    first = make_engine()
    hashes = make_hashes(6)
    first.serve("cold", hashes)
    first.drain()
    store = SHARED["store"]
    damaged = next(iter(store.values.values()))
    damaged[160 + 64] ^= 1

    assert make_engine().serve("second", hashes) < 6


def test_storage_that_never_answers_costs_a_miss(make_engine):
    """Lookups and loads end at their deadlines; slots are reused when the calls return."""
    first = make_engine()
    hashes = make_hashes(6)
    first.serve("cold", hashes)
    first.drain()
    second = make_engine(lookup_timeout_s=0.05, read_timeout_s=0.05)
    store = SHARED["store"]
    store.hang = Event()
    assert second.serve("lookup hangs", make_hashes(6, "new")) == 0

    store.hang.set()
    store.hang = None
    assert second.tier.match("load hangs", hashes, 0) is None
    until(lambda: [second.step(), second.tier.match("load hangs", hashes, 0) == 6][1])
    store.hang = Event()
    assert second.serve("load hangs", hashes) == 0
    store.hang.set()
    store.hang = None
    second.drain()


def test_no_step_waits_for_storage_that_hangs(make_engine):
    """With a lookup, a load and a store that never return, and deadlines of an hour, steps go
    on. A step that computes nothing gives storage a moment to answer; other steps do not."""
    first = make_engine()
    hashes = make_hashes(6)
    first.serve("cold", hashes)
    first.drain()
    engine = make_engine(lookup_timeout_s=3600, read_timeout_s=3600, write_timeout_s=3600)
    until(lambda: [engine.step(), engine.tier.match("load", hashes, 0) == 6][1])
    engine.serve("other", make_hashes(2, "other"))
    waits: list[float] = []
    engine.worker.storage.wait = waits.append
    SHARED["store"].hang = Event()
    engine.tier.load("load", hashes, 0, list(range(6)))
    assert engine.tier.match("lookup", make_hashes(6, "new"), 0) is None

    for _ in range(50):
        engine.step()
    assert engine.tier.match("lookup", make_hashes(6, "new"), 0) is None
    assert (engine.tier.has_work, waits) == (True, [])
    engine.step(computes=False)
    assert 0 < sum(waits) <= 0.002


def test_an_idle_vllm_makes_no_steps_for_writes_that_hang(make_engine):
    """After the deadline vLLM waits for requests again, with writes left; when storage answers,
    the next steps write them."""
    engine = make_engine(num_slots=64, lookup_timeout_s=0.05, write_timeout_s=0.05)
    engine.serve("first", make_hashes(1, "warm"))
    engine.drain()
    store = SHARED["store"]
    store.hang = Event()
    for n in range(6):
        engine.serve(str(n), make_hashes(1, f"run {n}"))
    until(lambda: [engine.step(), not engine.tier.has_work][1])
    held = len(engine.tier._stores), len(engine.tier.waiting)
    store.hang.set()
    store.hang = None

    until(lambda: [engine.step(), not engine.tier._lost][1])
    engine.drain()
    assert held == (4, 2)
    assert (len(engine.tier._stores), len(engine.tier.waiting)) == (0, 0)


def test_a_host_tier_full_of_leased_blocks_saves_what_fits(make_engine):
    """Nothing fails, and no block that a request holds is evicted."""
    engine = make_engine(num_slots=4)

    assert engine.serve("long", make_hashes(10)) == 0
    assert engine.serve("again", make_hashes(10)) >= 4


def test_any_mix_of_requests_and_faults_gives_right_bytes(make_engine):
    """Random prompts share prefixes, tiers are small, and storage fails at times."""
    rng = random.Random(11)
    engines = [make_engine(num_slots=24, eviction=name) for name in ("lru", "session")]
    for number in range(60):
        SHARED["store"].broken = rng.random() < 0.2
        base = make_hashes(rng.randrange(1, 9), f"base {rng.randrange(4)}")
        hashes = base + make_hashes(rng.randrange(0, 4), f"tail {number}")
        rng.choice(engines).serve(str(number), hashes)
    SHARED["store"].broken = False
    for engine in engines:
        engine.drain()


def test_a_load_counts_when_every_rank_has_reported(make_engine):
    """The slowest rank decides; a rank that is not quiet keeps the slots."""
    first = make_engine()
    hashes = make_hashes(4)
    first.serve("cold", hashes)
    first.drain()
    config = HostTierConfig(
        num_slots=8, block_tokens=TOKENS, identity=b"scheduler", num_ranks=2, eviction="lru"
    )
    tier = HostTier(config, SystemClock())
    assert tier.match("r", hashes, 0) is None
    [lookup] = tier.take_orders().lookups
    merged = RankReport({lookup.number: [OrderEnd(4)]}).aggregate(
        RankReport({lookup.number: [OrderEnd(3)]})
    )
    tier.receive(merged)
    assert tier.match("r", hashes, 0) == 3
    tier.load("r", hashes[:3], 0, [5, 6, 7])
    [load] = tier.take_orders().loads
    tier.receive(RankReport({load.number: [OrderEnd(3)]}))
    assert tier.has_work

    tier.receive(RankReport({load.number: [OrderEnd(0, is_quiet=False)]}))
    assert tier.match("r", hashes, 0) == 0
    assert tier._loads
    tier.receive(RankReport({load.number: [OrderEnd(0)]}))

    tier.finish("r", 64, 0)
    tier.check()
    assert not any((tier._loads, tier._requests, tier._reports))


def test_prefixes_that_prompts_share_are_written_before_others(make_engine):
    """While storage hangs, writes wait; the common prefix of two prompts is first."""
    engine = make_engine(num_slots=64, lookup_timeout_s=0.05)
    engine.serve("first", make_hashes(1, "warm"))
    engine.drain()
    SHARED["store"].hang = Event()
    for n in range(4):  # as many as run at once
        engine.serve(f"in flight {n}", make_hashes(1, f"in flight {n}"))
    engine.serve("alone", make_hashes(2, "alone"))
    system = make_hashes(2, "system")
    engine.tier._uses.record([*storage_keys(b"scheduler", system), b"another user"])
    engine.serve("user", [*system, *make_hashes(1, "user")])

    _, start, hashes = engine.tier.waiting.pop()

    assert (start, hashes[:2]) == (0, system)


def test_waiting_and_dropped_writes_are_metrics(make_engine):
    """The scheduler holds the queue, so it reports both. Blocks that did not fit are dropped
    and counted."""
    engine = make_engine(num_slots=64, lookup_timeout_s=0.05, max_waiting=2)
    engine.serve("first", make_hashes(1, "warm"))
    engine.drain()
    delta = StatsDelta()
    before = delta.take(sample_writes(engine.tier.waiting))
    SHARED["store"].hang = Event()
    for n in range(8):
        engine.serve(str(n), make_hashes(1, f"run {n}"))

    stats = delta.take(sample_writes(engine.tier.waiting))
    SHARED["store"].hang.set()
    SHARED["store"].hang = None
    engine.drain()
    later = delta.take(sample_writes(engine.tier.waiting))

    waiting, dropped = "headwater:storage_writes_waiting", "headwater:storage_writes_dropped"
    assert [one.data for one in (before, stats, later) if one is not None] == [
        {waiting: 0, dropped: 0},
        {waiting: 2, dropped: 2},
        {waiting: 0},
    ]
