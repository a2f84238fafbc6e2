"""A real Ray cluster of three nodes on this machine: placement, load, the loss of a node."""

import logging
import os
import signal
import time

import pytest

from tests.cluster.ray_up import (
    HEADERS,
    NEEDS_RAY,
    Load,
    RayCluster,
    assert_nothing_left,
    complete,
    process_id,
)
from tests.waiting import until

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, NEEDS_RAY]

FILE = """
roles: {prefill: {count: 2}, decode: {count: 2}}
routers: {host: ADDRESS, port: 0}
flags: {num-gpu-blocks-override: 64, threads: 1, max-model-len: 2048}
ray: {cpus_per_instance: 1}
"""


class RayNodes:
    """A head without room for instances, and nodes with room for three each."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self._cluster.add_node(num_cpus=3) for _ in range(3)]
        self.address = self._cluster.address

    def kill(self, node):
        """Kill all processes of the node at once, with SIGKILL."""
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self):
        """Kill the process that has Ray's state; nodes and actors stay."""
        self._cluster.head_node.kill_gcs_server(check_alive=False)

    def close(self):
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes():
    nodes = RayNodes()
    yield nodes
    nodes.close()


def test_a_lost_node_fails_no_request_and_its_instances_come_back(nodes, tmp_path):
    """Two prefill and two decode instances run on three nodes, and one node dies under load. All
    instances are back within the time of a start and 30 s. Then the cluster is scaled up and
    down under load, its router is killed and comes back, and nothing is left at the end."""
    cluster = RayCluster(nodes.address, tmp_path, FILE)
    url = cluster.members()["router"]["url"]
    load = Load(url, HEADERS)
    time.sleep(10)
    before = load.num_done
    nodes.kill(nodes.nodes.pop())
    lost_s = time.monotonic()
    until(lambda: any(m["restarts"] for m in cluster.members().values()), within_s=60)
    found = cluster.until_ready(5)
    back_s = time.monotonic() - lost_s
    log.info("ready after %.0f s, again %.0f s after the loss", cluster.start_s, back_s)
    cluster.ask("scale", "decode=3")
    cluster.until_ready(6)
    cluster.ask("scale", "decode=1")
    cluster.until_ready(4)
    time.sleep(5)
    load.stop()
    log.info("%d requests were answered, %d failed", load.num_done, len(load.failed))

    assert 0 < before < load.num_done
    assert sum(m["restarts"] for m in found.values()) >= 1
    assert not load.failed, load.failed[:3]
    assert back_s < cluster.start_s + 30

    os.kill(process_id(cluster.members()["router"]), signal.SIGKILL)
    until(lambda: cluster.members()["router"]["restarts"] == 1, within_s=60)
    until(lambda: complete(url, HEADERS, "hello") is None, within_s=60)
    pids = [process_id(member) for member in cluster.members().values()]
    cluster.down()
    assert_nothing_left(pids)


def test_serving_continues_when_the_head_is_lost(nodes, tmp_path):
    """The process with Ray's state is killed under load: for 20 s no request fails, and the
    cluster can still be stopped."""
    cluster = RayCluster(nodes.address, tmp_path, FILE)
    members = cluster.members()
    load = Load(members["router"]["url"], HEADERS)
    time.sleep(3)
    nodes.kill_head()
    before = load.num_done
    time.sleep(20)
    load.stop()
    cluster.down()

    assert load.num_done > before
    assert not load.failed, load.failed[:3]
    assert_nothing_left(process_id(member) for member in members.values())
