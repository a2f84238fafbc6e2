"""A real Ray cluster of three nodes on this machine: placement, load, the loss of a node."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from importlib import util

import httpx
import pytest

from tests.waiting import until

log = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        util.find_spec("ray") is None or "HEADWATER_NIGHTLY" not in os.environ,
        reason="needs Ray (pip install 'headwater[ray]') and minutes; scripts/nightly runs it",
    ),
]

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


def complete(url, headers, prompt):
    """Send a request; return the reason if it failed."""
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    except httpx.HTTPError as exc:
        return repr(exc)
    return None if answer.status_code == 200 else answer.text


class Load:
    """Clients that send requests until they are stopped, and the failures."""

    def __init__(self, url, headers, num_clients=3):
        self.url, self.headers = url, headers
        self.failed: list[str] = []
        self.num_done = 0
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(n,), daemon=True)
            for n in range(num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, number):
        turn = 0
        while not self._stopping.is_set():
            turn += 1
            prompt = f"client {number} " + "the water of a mountain spring, " * (turn % 6)
            failure = complete(self.url, self.headers, prompt)
            if failure is None:
                self.num_done += 1
            else:
                self.failed.append(failure)

    def stop(self):
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)


@pytest.fixture(scope="module")
def nodes():
    nodes = RayNodes()
    yield nodes
    nodes.close()


def node_address():
    import ray

    return ray._private.services.get_node_ip_address()


class RayCluster:
    """`headwater up --ray`, and the commands that control it."""

    def __init__(self, nodes, folder):
        file = folder / "cluster.yaml"
        file.write_text(FILE.replace("ADDRESS", node_address()))
        began_s = time.monotonic()
        self._environment = os.environ | {
            "HEADWATER_STATE": str(folder / "state"),
            "HEADWATER_API_KEY": "k" * 32,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headwater", "up", "-f", str(file), "--ray", nodes.address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.lines: list[str] = []
        for line in self._output:
            self.lines.append(line)
            if "stop with" in line:
                break
        self._reader = threading.Thread(
            target=self.lines.extend, args=(self._output,), daemon=True
        )
        self._reader.start()
        assert self._process.poll() is None, self.lines
        self.start_s = time.monotonic() - began_s

    def ask(self, *words):
        done = subprocess.run(
            [sys.executable, "-m", "headwater", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def members(self):
        return {m["name"]: m for m in json.loads(self.ask("status", "--json"))["members"]}

    def until_ready(self, count, within_s=240):
        deadline = time.monotonic() + within_s
        while True:
            found = self.members()
            if len(found) == count and all(m["state"] == "ready" for m in found.values()):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(1)

    def down(self):
        self.ask("down")
        assert self._process.wait(timeout=120) == 0, self.lines
        self._reader.join()
        self._output.close()


HEADERS = {"authorization": "Bearer " + "k" * 32}


def assert_nothing_left(pids):
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)


def test_a_lost_node_fails_no_request_and_its_instances_come_back(nodes, tmp_path):
    """Two prefill and two decode instances run on three nodes, and one node dies under load. All
    instances are back within the time of a start and 30 s. Then the cluster is scaled up and
    down under load, its router is killed and comes back, and nothing is left at the end."""
    cluster = RayCluster(nodes, tmp_path)
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
    cluster = RayCluster(nodes, tmp_path)
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


def process_id(member):
    return int(member["place"].split()[1])
