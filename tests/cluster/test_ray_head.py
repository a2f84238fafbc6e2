"""Ray's head is killed, with and without a Redis that has its state: serving and supervision."""

import logging
import shutil
import signal
import time
from contextlib import ExitStack, contextmanager

import pytest

from tests.cluster.ray_nodes import RayCommands
from tests.cluster.ray_up import (
    HEADERS,
    NEEDS_RAY,
    Load,
    RayCluster,
    assert_nothing_left,
    process_id,
    stream,
)
from tests.storage.conftest import RedisServer
from tests.waiting import is_running, until

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.slow,
    NEEDS_RAY,
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
]

FILE = """
roles: {prefill: {count: 1}, decode: {count: 2}}
routers: {host: ADDRESS, port: 0}
flags: {num-gpu-blocks-override: 256, threads: 1, max-model-len: 2048}
ray: {cpus_per_instance: 1, node_address: NODE}
"""


@contextmanager
def started(folder, *, redis=None, at_head=False):
    """A head, a node without room to which `up` is attached unless it is `at_head`, and two nodes
    with room. All processes are gone at the end."""
    with ExitStack() as stack:
        nodes = RayCommands(redis=redis)
        stack.callback(nodes.close)
        attached, *_ = nodes.add_nodes(0, 2, 2)
        text = FILE.replace("NODE", "null" if at_head else attached)
        cluster = RayCluster(nodes.address, folder, text)
        stack.callback(cluster.close)
        yield nodes, cluster
    assert not nodes.processes()


@pytest.fixture
def redis(tmp_path):
    redis = RedisServer(tmp_path)
    yield redis
    redis.stop()


def test_a_head_with_redis_is_replaced_under_load(redis, tmp_path, monkeypatch):
    """The head is killed under load, and an instance with it: no request and no stream fails.
    A new head on the same Redis lets the instance come back, and also the next instance that is
    killed. After `down` without a head, no process is left, and the next head has no placement
    group."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    with started(tmp_path, redis=redis) as (nodes, cluster):
        members = cluster.members()
        url = members["router"]["url"]
        load, streams = Load(url, HEADERS), Load(url, HEADERS, 2, ask=stream)
        time.sleep(5)
        nodes.kill("head")
        before = load.num_done
        time.sleep(15)
        without_head = load.num_done - before
        cluster.kill("decode-2")
        time.sleep(10)
        assert cluster.members()["decode-1"]["state"] == "ready"
        assert cluster.members()["decode-2"]["state"] != "ready"
        nodes.start_head()
        found_s = cluster.until_back("decode-2", starts=1)
        cluster.kill("decode-1")
        again_s = cluster.until_back("decode-1", starts=1)
        load.stop()
        streams.stop()
        log.info(
            "%d requests and %d streams were answered, %d of the requests in 15 s without a head; "
            "%d failed",
            *(load.num_done, streams.num_done, without_head),
            len(load.failed) + len(streams.failed),
        )
        log.info("strength: %.0f s after the new head, %.0f s after a kill", found_s, again_s)

        assert without_head > 0
        assert streams.num_done > 0
        assert not load.failed + streams.failed, (load.failed + streams.failed)[:3]
        pids = [process_id(member) for member in cluster.members().values()]
        assert "3.0 used of 3.0 reserved in placement groups" in nodes.ray("status")
        nodes.kill("head")
        cluster.down()
        assert_nothing_left(pids)
        until(lambda: not nodes.instances())
        nodes.start_head()
        until(lambda: "0.0/4.0 CPU\n" in nodes.ray("status"), within_s=60)


def test_up_attached_to_the_head_starts_its_instances_again(redis, tmp_path, monkeypatch):
    """Requests are answered until a new head starts, which ends the instances that the lost one
    had. Then `up` attaches to the new head and starts all instances again; Ctrl-C still ends
    it."""
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    with started(tmp_path, redis=redis, at_head=True) as (nodes, cluster):
        load = Load(cluster.members()["router"]["url"], HEADERS)
        nodes.kill("head")
        before = load.num_done
        time.sleep(15)
        load.stop()
        assert load.num_done > before
        assert not load.failed, load.failed[:3]
        nodes.start_head()
        back_s = sum(
            cluster.until_back(name, starts=1) for name in ("prefill-1", "decode-1", "decode-2")
        )
        log.info("attached to the head: strength %.0f s after the new head", back_s)
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(timeout=60) == 0
        until(lambda: not nodes.instances())


def test_a_head_without_redis_ends_the_cluster_after_its_nodes_give_up(tmp_path):
    """Requests are answered until Ray's nodes end, which is a minute later. Then `up` ends with
    an error, and nothing is left."""
    with started(tmp_path) as (nodes, cluster):
        members = cluster.members()
        load = Load(members["router"]["url"], HEADERS)
        time.sleep(5)
        nodes.kill("head")
        killed_s, before = time.monotonic(), load.num_done
        until(lambda: time.monotonic() > killed_s + 45, within_s=60)
        failed, num_done = list(load.failed), load.num_done - before
        code = cluster.process.wait(timeout=60)
        ended_s = time.monotonic() - killed_s
        load.stop()
        log.info(
            "%d requests in 45 s, %d failed; ended after %.0f s", num_done, len(failed), ended_s
        )

        assert num_done > 0
        assert not failed, failed[:3]
        assert code != 0
        pids = [process_id(member) for member in members.values()]
        until(lambda: not any(map(is_running, pids)) and not nodes.instances(), within_s=60)
