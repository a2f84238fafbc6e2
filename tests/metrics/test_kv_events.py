"""KV events over real sockets: a consumer knows exactly what is cached."""

import hashlib
import itertools
import random
import threading
import time

import msgspec
import numpy as np
import pytest
import zmq

from headwater.cache import Namespace
from headwater.clock import SystemClock
from headwater.config import KvEventsConfig
from headwater.errors import ConfigError
from headwater.events import BlocksCleared, BlocksRemoved, BlocksStored, CacheEvent
from headwater.metrics.kv_events import (
    BlockStored,
    decode_batch,
    encode_batch,
    encode_snapshot,
)
from headwater.metrics.kv_publisher import KvPublisher
from headwater.types import BlockKey, Tier, WritePolicy
from tests.cache.follower import cached
from tests.cache.make import BLOCK, make_cache, make_path, serve, write_down
from tests.metrics.consumer import Consumer

MEDIA = ("GPU", "CPU", "STORAGE")


class Instance:
    """A cache that publishes; `turn` is what the engine loop does after each step."""

    def __init__(self, endpoint="tcp://127.0.0.1:*", replay="tcp://127.0.0.1:*", **settings):
        self.cache = make_cache(
            8,
            host_blocks=12,
            storage=True,
            max_stored_nodes=6,
            write_policy=WritePolicy.WRITE_THROUGH,
            record_events=True,
        )
        self.woken: list[None] = []
        max_queued = settings.pop("max_queued", 4096)
        self.publisher = KvPublisher(
            KvEventsConfig(endpoint=endpoint, replay_endpoint=replay, **settings),
            block_tokens=BLOCK,
            clock=SystemClock(),
            started_s=1.7e9,
            wake=lambda: self.woken.append(None),
            max_queued=max_queued,
        )

    def turn(self):
        self.publisher.publish(self.cache.take_events())
        if self.publisher.snapshot_wanted:
            self.publisher.publish_snapshot(list(self.cache.snapshot_events()))

    def truth(self):
        tiers = cached(self.cache)
        return {
            medium: {int.from_bytes(key[-8:], "big") for key in keys}
            for medium, keys in zip(MEDIA, tiers.values(), strict=True)
        }

    def live(self, chance, steps):
        """Some requests, so that blocks come and go in every tier."""
        for _ in range(steps):
            path = [chance.randrange(4) for _ in range(chance.randrange(1, 6))]
            salt = chance.choice(["", "", "tenant"])
            serve(self.cache, make_path(*path, namespace=Namespace(salt=salt)))
            write_down(self.cache)
            write_down(self.cache)
            self.turn()

    def ask(self, consumer, start=None):
        """Let `consumer` request a replay while the loop sleeps and wakes when signalled."""
        asking = threading.Thread(target=consumer.ask, args=(start,))
        asking.start()
        while asking.is_alive():
            self.turn()
            asking.join(0.005)

    def close(self):
        self.publisher.close()


@pytest.fixture
def instance():
    instance = Instance(buffer_steps=8, token_ids=True)
    yield instance
    instance.close()


@pytest.fixture
def consumer(instance):
    consumer = Consumer(instance.publisher.endpoint, instance.publisher.replay_endpoint)
    instance.ask(consumer)
    until_subscribed(instance, consumer)
    yield consumer
    consumer.close()


def until_subscribed(instance, consumer):
    """Wait until the subscription is active; messages that are published before are lost."""
    while not consumer._sub.poll(10):
        serve(instance.cache, make_path(9))
        instance.cache.reset()
        instance.turn()


def test_messages_are_exactly_in_the_format(instance, consumer):
    """A message has three frames and a map for each event; hashes are the low 64 bits of the
    keys."""
    path = make_path(1, 2)
    consumer.hear()
    serve(instance.cache, path)
    instance.turn()

    assert consumer._sub.poll(5000)
    topic, sequence, payload = consumer._sub.recv_multipart()

    first, second = (int.from_bytes(k[24:], "big") for k in instance.cache.keys(path, 2))
    assert topic == b""
    assert sequence == consumer.next.to_bytes(8, "big")
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert isinstance(ts, float)
    assert rank == 0
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": [first, second],
            "parent_block_hash": None,
            "token_ids": [1] * BLOCK + [2] * BLOCK,
            "extra_keys": None,
            "block_size": BLOCK,
            "lora_id": None,
            "lora_name": None,
            "medium": "GPU",
        }
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_consumer_knows_every_block_of_every_medium(instance, consumer, seed):
    """Lesson 71: after gaps within the buffer, gaps beyond it and resets, the view is exact."""
    chance = random.Random(seed)
    for lost in (0, 1, 5, 20):
        consumer.hear()
        before = instance.publisher._next
        instance.live(chance, max(lost, 3))
        if lost == 5:
            instance.cache.reset()
            instance.live(chance, 1)
        deadline = time.monotonic() + 30
        while instance.publisher._queue.qsize():
            assert time.monotonic() < deadline, "nothing is published"
        consumer.lose(min(lost, instance.publisher._next - before))
        instance.ask(consumer)
        consumer.hear()

        assert consumer.blocks == instance.truth()
    assert consumer.snapshots > 0
    assert all(consumer.blocks.values())


def test_a_restart_begins_a_new_epoch(instance, consumer):
    """Lesson 71: a consumer of the earlier engine asks with an old sequence number and gets a
    snapshot of the new engine."""
    instance.live(random.Random(1), 6)
    consumer.hear()
    address = instance.publisher.endpoint, instance.publisher.replay_endpoint
    instance.close()

    again = Instance(*address)
    again.live(random.Random(2), 2)
    again.ask(consumer, start=consumer.next + 50)

    assert consumer.blocks == again.truth()
    assert consumer.next == again.publisher._next
    again.close()


def test_tokens_of_salted_prompts_are_not_published(instance, consumer):
    """Lesson 67: blocks of a salted prompt are counted, but its tokens are in no message."""
    consumer.hear()
    serve(instance.cache, make_path(1, 2, namespace=Namespace(salt="tenant")))
    instance.turn()
    instance.ask(consumer)
    instance.ask(consumer, start=0)

    assert not {1, 2} & set(consumer.token_ids)
    assert consumer.blocks == instance.truth()


def test_a_consumer_that_is_too_slow_gets_a_snapshot():
    """The loop never waits: if the publisher's thread is too slow, a snapshot replaces the
    events."""
    instance = Instance(max_queued=0)
    consumer = Consumer(instance.publisher.endpoint, instance.publisher.replay_endpoint)
    for seed in range(3):
        instance.live(random.Random(seed), 4)
        while instance.publisher._overrun:  # until the thread has asked for the snapshot
            instance.turn()
        instance.ask(consumer)
        assert consumer.blocks == instance.truth()
    consumer.close()
    instance.close()


def test_the_queue_of_a_slow_publisher_thread_is_bounded():
    """However far the thread is behind, the queue has at most `max_queued` batches, and one
    snapshot is made when it has caught up."""
    gate = threading.Event()

    class Slow(KvPublisher):
        def _payload(self, changes):
            if threading.current_thread().name == "kv-events":
                gate.wait()
            return super()._payload(changes)

    publisher = Slow(
        KvEventsConfig(),
        block_tokens=BLOCK,
        clock=SystemClock(),
        started_s=0.0,
        wake=lambda: woken.set(),
        max_queued=8,
    )
    woken, num_snapshots = threading.Event(), 0
    changes = [BlocksRemoved(tier=Tier.DEVICE, keys=[BlockKey(bytes(32))])]

    for _ in range(200):
        publisher.publish(changes)
        assert not publisher.snapshot_wanted
        assert publisher._queue.qsize() <= 8
    gate.set()
    assert woken.wait(10)
    for _ in range(200):
        publisher.publish(changes)
        if publisher.snapshot_wanted:
            num_snapshots += 1
            publisher.publish_snapshot(changes)
        assert publisher._queue.qsize() <= 8 + 2

    publisher.close()
    assert num_snapshots >= 1


def test_a_long_batch_gives_the_tokens_of_a_short_one():
    """Events have a bounded size and chained parents; a reader ends with the same blocks and
    tokens."""
    keys = [BlockKey(hashlib.sha256(bytes([n % 256, n // 256])).digest()) for n in range(1000)]
    tokens = np.arange(1000 * BLOCK, dtype="<i4").tobytes()
    changes: list[CacheEvent] = [
        BlocksCleared(),
        BlocksStored(tier=Tier.DEVICE, keys=keys, parent=None, tokens=tokens),
        BlocksStored(tier=Tier.HOST, keys=keys[5:], parent=keys[4], tokens=b""),
        BlocksRemoved(tier=Tier.HOST, keys=keys[7:9]),
    ]
    short = decode_batch(encode_batch(3.5, changes, BLOCK))
    long = decode_batch(encode_snapshot(3.5, changes, BLOCK))

    assert (long.ts, long.dp_rank) == (short.ts, short.dp_rank)
    runs = [e for e in long.events if isinstance(e, BlockStored)]
    assert max(len(e.block_hashes) for e in runs) <= 64
    for medium in ("GPU", "CPU"):
        stored = [e for e in long.events if isinstance(e, BlockStored) and e.medium == medium]
        [whole] = [e for e in short.events if isinstance(e, BlockStored) and e.medium == medium]
        assert [h for e in stored for h in e.block_hashes] == whole.block_hashes
        assert [t for e in stored for t in e.token_ids] == whole.token_ids
        assert stored[0].parent_block_hash == whole.parent_block_hash
        for before, after in itertools.pairwise(stored):
            assert after.parent_block_hash == before.block_hashes[-1]
    assert (long.events[0], long.events[-1]) == (short.events[0], short.events[-1])


def test_malformed_replay_requests_are_ignored(instance, consumer):
    """A malformed replay request gets no answer, and nothing else is affected."""
    context = zmq.Context()
    for frames in ([b""], [b"", b"x"], [b"x", bytes(8)], [b"", bytes(8), b""], [bytes(1000)]):
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(instance.publisher.replay_endpoint)
            dealer.send_multipart(frames)
            assert not dealer.poll(30)
    context.destroy()
    instance.live(random.Random(0), 2)
    instance.ask(consumer)

    assert consumer.blocks == instance.truth()


def test_a_port_in_use_gets_a_message(instance):
    """Lesson 60: a port in use is reported at start, with the address."""
    with pytest.raises(ConfigError, match="cannot bind"):
        Instance(instance.publisher.endpoint)
