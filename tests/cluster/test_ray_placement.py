"""Placement on a real Ray cluster of three nodes: near, spread, without room, and what is left."""

import logging
import signal
import time
from collections import Counter
from urllib.parse import urlsplit

import pytest

from tests.cluster.ray_nodes import RayCommands
from tests.cluster.ray_up import HEADERS, NEEDS_RAY, RayCluster, complete, process_id
from tests.waiting import is_running, until

log = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, NEEDS_RAY]

FILE = """
roles: {prefill: {count: 2}, decode: {count: 2}}
routers: {host: ADDRESS, port: 0}
flags: {num-gpu-blocks-override: 64, threads: 1, max-model-len: 2048}
ray: {cpus_per_instance: 1, prefill_near_decode: NEAR}
"""

LARGE = """
roles: {mixed: {count: 2}}
routers: {host: ADDRESS, port: 0}
flags: {num-gpu-blocks-override: 64, threads: 1, max-model-len: 2048}
ray: {cpus_per_instance: CPUS}
"""

RANKS = """
roles: {mixed: {count: 1}}
routers: {host: ADDRESS, port: 0}
gpus_per_instance: 2
tensor_parallel_size: 2
flags: {device: cpu, num-gpu-blocks-override: 64, threads: 1, max-model-len: 2048}
"""


@pytest.fixture(scope="module")
def nodes():
    """A head without room, a node with four CPUs and two GPUs, two with two CPUs and a GPU."""
    nodes = RayCommands()
    try:
        nodes.add_nodes(4, num_gpus=2)
        nodes.add_nodes(2, 2, num_gpus=1)
        yield nodes
    finally:
        nodes.close()


def node_of(members, name):
    return urlsplit(members[name]["url"]).hostname


def test_groups_are_near_or_spread_and_never_outlive_up(nodes, tmp_path):
    """Prefill and decode instances share nodes when asked. An instance for which no node has
    room waits, says why and delays no other; its group is pending in `ray status`. Groups end
    with their instances, also when `up` is killed."""
    (tmp_path / "near").mkdir()
    cluster = RayCluster(nodes.address, tmp_path / "near", FILE.replace("NEAR", "true"))
    try:
        members = cluster.members()
        assert node_of(members, "prefill-1") != node_of(members, "prefill-2")
        assert {node_of(members, f"prefill-{n}") for n in (1, 2)} == {
            node_of(members, f"decode-{n}") for n in (1, 2)
        }
        cluster.ask("scale", "decode=7")
        until(lambda: cluster.members()["decode-7"]["state"] == "waiting", within_s=60)
        cluster.ask("restart", "prefill-1")
        until(lambda: cluster.members()["prefill-1"]["restarts"] == 1, within_s=60)
        until(lambda: cluster.members()["decode-6"]["state"] == "ready", within_s=120)
        until(lambda: cluster.members()["prefill-1"]["state"] == "ready", within_s=120)
        status = nodes.ray("status")
        cluster.ask("scale", "decode=2")
        until(lambda: len(cluster.members()) == 5, within_s=120)
        until(lambda: "4.0 used of 4.0 reserved" in nodes.ray("status"), within_s=30)
        pids = [process_id(member) for member in cluster.members().values()]
        cluster.process.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        until(lambda: not any(map(is_running, pids)) and not nodes.instances(), within_s=60)
        log.info("all processes ended %.0f s after the kill", time.monotonic() - killed_s)
        until(lambda: "0.0/8.0 CPU" in nodes.ray("status"), within_s=60)
        log.info("all groups were gone %.0f s after the kill", time.monotonic() - killed_s)
    finally:
        cluster.close()

    assert "{'CPU': 1.0} * 1 (STRICT_PACK): 1+ pending placement groups" in status
    sentences = [
        line for line in cluster.lines if "decode-7 asks for 1 CPU on one node" in line
    ]
    assert len(sentences) == 1, cluster.lines
    assert "it starts when there is room" in sentences[0]


def test_instances_are_spread_and_what_does_not_fit_waits(nodes, tmp_path):
    """Each node gets an instance before one gets a second. With larger instances, one node has
    room for one: the cluster is ready with it, and the other waits."""
    (tmp_path / "spread").mkdir()
    cluster = RayCluster(nodes.address, tmp_path / "spread", FILE.replace("NEAR", "false"))
    try:
        members = cluster.members()
        used = Counter(node_of(members, name) for name in members if name != "router")
        assert sorted(used.values()) == [1, 1, 2]
        cluster.down()
    finally:
        cluster.close()

    cluster = RayCluster(nodes.address, tmp_path, LARGE.replace("CPUS", "3"))
    try:
        states = {name: member["state"] for name, member in cluster.members().items()}
        assert sorted(states.values()) == ["ready", "ready", "waiting"]
        assert complete(cluster.members()["router"]["url"], HEADERS, "hello") is None
        cluster.down()
    finally:
        cluster.close()


def test_ranks_of_an_instance_are_together(nodes, tmp_path):
    """An instance with two ranks and a GPU for each gets the node with two GPUs. Another one
    waits, although two nodes have a GPU each."""
    cluster = RayCluster(nodes.address, tmp_path, RANKS)
    try:
        members = cluster.members()
        assert node_of(members, "mixed-1") == "127.0.0.2"
        assert complete(members["router"]["url"], HEADERS, "hello") is None
        cluster.ask("scale", "mixed=2")
        until(lambda: cluster.members()["mixed-2"]["state"] == "waiting", within_s=60)
        status = nodes.ray("status")
        cluster.down()
    finally:
        cluster.close()

    lines = "".join(cluster.lines)
    assert "mixed-2 asks for 1 CPU and 2 GPUs on one node, and no node has that much" in lines
    assert "'GPU': 2.0" in status.partition("Pending Demands")[2]


def test_what_can_never_be_placed_is_said_in_one_sentence(nodes, tmp_path):
    """The sentence has the sizes of the nodes. `up` waits for a larger node until Ctrl-C ends
    it."""
    text = LARGE.replace("CPUS", "9")
    cluster = RayCluster(nodes.address, tmp_path, text, until_line="mixed-2 asks for")
    try:
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(timeout=60) == 0
    finally:
        cluster.close()

    sentences = [line for line in cluster.lines if "asks for" in line]
    assert len(sentences) == 2, cluster.lines
    assert (
        "mixed-1 asks for 9 CPUs on one node, and no node of the Ray cluster is that"
        in sentences[0]
    )
    assert "127.0.0.2 has 4 of 4 CPUs free" in sentences[0]
    until(lambda: "no resource demands" in nodes.ray("status"), within_s=60)
