"""Nodes of a Ray cluster on this machine, each started with the commands of docs/cluster.md.

Every node has an address of its own in 127.0.0.0/8, as if it were a machine of its own.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from headwater.testing.ports import free_port
from tests.waiting import is_running, until

RAY = Path(sys.executable).with_name("ray")
_MARK = "HEADWATER_TEST_RAY_NODE"


def node_address():
    """The address of this machine, as Ray finds it."""
    import ray

    return ray.util.get_node_ip_address()


class RayCommands:
    """`ray start` for a head and its nodes, each of which can be killed with SIGKILL."""

    def __init__(self, *, redis=None):
        self._mark, self._nodes = secrets.token_hex(8), 0
        self._redis = {} if redis is None else {"RAY_REDIS_ADDRESS": f"127.0.0.1:{redis.port}"}
        self._folders: list[Path] = []
        host = node_address()
        self.address = f"{host}:{free_port(host)}"
        self.start_head()

    def start_head(self):
        """The head, without room for instances. On the same Redis it has the same state.

        Its files are in a new folder, as on a new machine: Ray refuses to start a head twice on
        one machine while a node of it runs there."""
        folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
        self._folders.append(folder)
        host, _, port = self.address.partition(":")
        self._start(
            "head",
            *("--head", "--port", port, "--node-ip-address", host, "--num-cpus", "0"),
            *("--include-dashboard", "false", "--temp-dir", str(folder)),
        )

    def add_nodes(self, *num_cpus, num_gpus=0):
        """A node with each of these numbers of CPUs; returns their addresses. Ray does not check
        that GPUs exist."""
        names = [f"127.0.0.{self._nodes + number + 2}" for number in range(len(num_cpus))]
        self._nodes += len(num_cpus)
        for name, count in zip(names, num_cpus, strict=True):
            self._add_node(name, count, num_gpus)
        return names

    def _add_node(self, address, num_cpus, num_gpus):
        self._start(
            address,
            *("--address", self.address, "--node-ip-address", address),
            *("--num-cpus", str(num_cpus), "--num-gpus", str(num_gpus)),
            *("--temp-dir", str(self._folders[0])),
        )

    def kill(self, node):
        """Kill all processes of a node (its address, or `head`) with SIGKILL."""
        self._kill(f"{self._mark}-{node}.")

    def processes(self):
        """Processes of all nodes, with everything that runs below them."""
        return self._marked(self._mark)

    def instances(self):
        """Processes of `headwater` on all nodes."""
        lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in self.processes()}
        return [pid for pid, line in lines.items() if b"headwater" in line.read_bytes()]

    def close(self):
        self._kill(self._mark)
        for folder in self._folders:
            shutil.rmtree(folder)

    def ray(self, *words):
        """The output of a command of Ray."""
        done = subprocess.run(
            [RAY, *words],
            env=os.environ | {"RAY_ADDRESS": self.address},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return done.stdout

    def _start(self, node, *words):
        environment = os.environ | self._redis | {_MARK: f"{self._mark}-{node}."}
        environment |= {"RAY_DISABLE_IMPORT_WARNING": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(
            [RAY, "start", *words, "--object-store-memory", "100000000"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout

    def _kill(self, mark):
        def none_left():
            pids = self._marked(mark)
            for pid in pids:
                _kill(pid)
            return not pids

        until(none_left)

    def _marked(self, mark):
        """Processes that have the mark in their environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                has = f"{_MARK}={mark}".encode() in path.read_bytes()
            except OSError:
                continue
            pid = int(path.parent.name)
            if has and is_running(pid):
                found.append(pid)
        return found


def _kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
