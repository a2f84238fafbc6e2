"""KV events: no prompts unless configured, and no consumers without the secret."""

import asyncio
import struct

import msgspec
import pytest
import zmq

from headwater.cache import Namespace
from headwater.clock import SystemClock
from headwater.config import EngineConfig, KvEventsConfig
from headwater.errors import ConfigError
from headwater.launch.events import open_events
from headwater.metrics.kv_curve import CurveKeys
from headwater.metrics.kv_publisher import KvPublisher
from headwater.testing.engines import make_echo_core, make_echo_info
from tests.cache.make import BLOCK, make_path, serve
from tests.metrics.test_kv_events import Instance
from tests.router.harness import run

TOKEN = "a-secret-of-the-cluster"


def publisher(**settings):
    return KvPublisher(
        KvEventsConfig(**settings.pop("config", {})),
        block_tokens=16,
        clock=SystemClock(),
        started_s=1.7e9,
        wake=lambda: None,
        **settings,
    )


def replayed(endpoint, keys=None, within_ms=1500):
    """The batches that a consumer with `keys` gets; None when it gets no answer."""
    context = zmq.Context()
    with context.socket(zmq.DEALER) as asked:
        asked.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.connect(asked)
        asked.connect(endpoint)
        asked.send_multipart([b"", struct.pack(">q", 0)])
        batches: list[list[object]] = []
        while asked.poll(within_ms):
            frames = asked.recv_multipart()
            if not frames[-1]:
                context.destroy(linger=0)
                return batches
            batches.append(msgspec.msgpack.decode(frames[-1]))
    context.destroy(linger=0)
    return None


def test_a_listener_without_the_secret_gets_nothing():
    """The listener gets no replay and no events, neither without keys nor with keys of another
    token."""
    source = publisher(keys=CurveKeys.of_token(TOKEN))
    try:
        assert replayed(source.replay_endpoint) is None
        assert replayed(source.replay_endpoint, CurveKeys.of_token("another secret")) is None
        assert replayed(source.replay_endpoint, CurveKeys.of_token(TOKEN)) is not None
    finally:
        source.close()


def test_token_ids_are_published_only_when_asked_for():
    """Hashes are enough for a router; token ids are prompts."""
    for wanted in (False, True):
        instance = Instance(token_ids=wanted)
        serve(instance.cache, make_path(7, 7))
        instance.turn()
        found = stored(instance)
        assert [event["token_ids"] for event in found] == [[7] * BLOCK * 2 if wanted else []]
        instance.publisher.close()


def test_salted_blocks_have_no_token_ids_and_an_id_of_their_salt():
    """`extra_keys` lets an indexer tell namespaces apart without knowing the salt."""
    ids = []
    for salt in ("tenant-a", "tenant-b"):
        instance = Instance(token_ids=True)
        path = make_path(7, namespace=Namespace(salt=salt))
        serve(instance.cache, path)
        instance.turn()
        (event,) = stored(instance)
        assert event["token_ids"] == []
        (extra,) = event["extra_keys"]
        assert salt not in str(extra)
        ids.append(extra)
        instance.publisher.close()
    assert ids[0] != ids[1]


def stored(instance):
    batches = replayed(instance.publisher.replay_endpoint)
    return [event for batch in batches for event in batch[1] if event["type"] == "BlockStored"]


@pytest.mark.parametrize(
    "settings",
    [
        {"token_ids": True},
        {"endpoint": "tcp://0.0.0.0:*"},
        {"replay_endpoint": "tcp://*:*"},
        {"endpoint": "tcp://10.0.0.1:5557"},
    ],
)
def test_prompts_or_other_hosts_need_a_secret(settings, monkeypatch):
    """A publisher of token ids, or one that other hosts can reach, does not start without a
    peer token; `insecure` is the exception."""
    monkeypatch.delenv("HEADWATER_PEER_TOKEN", raising=False)
    config = EngineConfig(kv_events=KvEventsConfig(**settings))
    with pytest.raises(ConfigError, match="HEADWATER_PEER_TOKEN"):
        open_events(config, make_echo_core(record_events=True), make_echo_info(), SystemClock())
    assert not KvEventsConfig(**settings, insecure=True).needs_secret


def test_an_insecure_publisher_warns(monkeypatch, caplog):
    """The log says what consumers learn."""
    monkeypatch.setenv("HEADWATER_PEER_TOKEN", TOKEN)
    config = EngineConfig(kv_events=KvEventsConfig(insecure=True, token_ids=True))
    core = make_echo_core(record_events=True)
    info = open_events(config, core, make_echo_info(), SystemClock())
    core.close()
    assert info.kv_events is not None
    assert not info.kv_events.curve
    assert "without authentication" in caplog.text
    assert "prompts" in caplog.text


def test_the_router_follows_with_the_secret():
    """The router's view of an instance whose sockets are authenticated is exact."""

    async def scenario(harness):
        instance = harness.add()
        await harness.ready(instance)
        assert (await harness.complete()).status_code == 200
        await harness.until(lambda known: known[instance.name]["known_blocks"] > 0)
        endpoint = instance.engine.info.kv_events.replay_endpoint
        assert await asyncio.to_thread(replayed, endpoint) is None

    run(scenario)
