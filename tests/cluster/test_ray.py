"""A real Ray cluster of three nodes on this machine: placement, load, the loss of a node."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from importlib import util

import httpx
import pytest

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
    """A head without room for instances, and nodes with room for two each."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self._cluster.add_node(num_cpus=2) for _ in range(3)]
        self.address = self._cluster.address

    def kill(self, node):
        """Kill all processes of the node at once, with SIGKILL."""
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self):
        self._cluster.shutdown()


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
            body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True}
            try:
                answer = httpx.post(
                    f"{self.url}/v1/completions", json=body, headers=self.headers, timeout=120
                )
                if answer.status_code == 200:
                    self.num_done += 1
                else:
                    self.failed.append(answer.text)
            except httpx.HTTPError as exc:
                self.failed.append(repr(exc))

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
        self.lines: list[str] = []
        for line in self._process.stdout:
            self.lines.append(line)
            if "stop with" in line:
                break
        threading.Thread(
            target=self.lines.extend, args=(self._process.stdout,), daemon=True
        ).start()
        assert self._process.poll() is None, self.lines

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


def test_a_lost_node_fails_no_request_and_its_instances_come_back(nodes, tmp_path):
    """Two prefill and two decode instances run on three nodes, and one node dies under load.
    Then the cluster is scaled and stopped, and nothing is left."""
    cluster = RayCluster(nodes, tmp_path)
    headers = {"authorization": "Bearer " + "k" * 32}
    load = Load(cluster.members()["router"]["url"], headers)
    time.sleep(10)
    before = load.num_done
    nodes.kill(nodes.nodes.pop())
    time.sleep(5)
    found = cluster.until_ready(5)
    cluster.ask("scale", "decode=1")
    cluster.until_ready(4)
    time.sleep(5)
    load.stop()
    pids = [int(m["place"].split()[1]) for m in cluster.members().values()]
    cluster.down()

    assert 0 < before < load.num_done
    assert sum(m["restarts"] for m in found.values()) >= 1
    assert not load.failed, load.failed[:3]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)
