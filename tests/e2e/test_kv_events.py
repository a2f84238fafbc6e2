"""KV events of a real server with every tier, read by a consumer that knows only the format."""

import json

import pytest

from tests.e2e.live import LiveServer
from tests.metrics.consumer import Consumer

pytestmark = pytest.mark.slow

FLAGS = ("--swap-space", "0.01", "--write-policy", "write_through", "--max-model-len", "2048")


def start(folder):
    events = json.dumps({"buffer_steps": 2, "topic": "kv"})
    storage = json.dumps({"path": str(folder), "capacity_bytes": 1 << 26})
    return LiveServer(
        *FLAGS,
        "--kv-events-config",
        events,
        "--kvcache-storage-backend",
        "file",
        "--kvcache-storage-config",
        storage,
        blocks=24,
    ).wait_ready()


def follow(server):
    told = server.get("/server_info").json()["kv_events"]
    assert told["topic"] == "kv"
    assert told["block_size"] == 64
    return Consumer(told["endpoint"], told["replay_endpoint"], b"kv"), told["epoch"]


def until_agreed(server, consumer):
    """Repeat until events and /cache agree about device and host, because copies end
    asynchronously."""
    while True:
        consumer.ask()
        tiers = server.get("/cache").json()["tiers"]
        counts = (len(consumer.blocks["GPU"]), len(consumer.blocks["CPU"]))
        if counts == (tiers["device"]["cached"], tiers["host"]["cached"]) and min(counts) > 0:
            return


def test_a_real_server_is_followed_through_all_tiers_and_a_restart(tmp_path):
    """Lesson 71: an idle engine answers with a snapshot, all evictions and writes are reported,
    a reset clears, and a restarted engine has another epoch and starts empty."""
    server = start(tmp_path)
    consumer, epoch = follow(server)
    for number in range(6):
        server.complete(prompt=f"prompt number {number} " * 25, max_tokens=2)
    until_agreed(server, consumer)
    assert consumer.snapshots > 0
    assert consumer.blocks["STORAGE"]

    server.post("/reset_prefix_cache")
    consumer.ask()
    assert not any(consumer.blocks.values())
    consumer.close()
    assert server.stop() == 0

    again = start(tmp_path)
    consumer, another = follow(again)
    consumer.ask()
    assert another != epoch
    assert not any(consumer.blocks.values())
    consumer.close()
    assert again.stop() == 0
