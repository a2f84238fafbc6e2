"""`headwater up`: what it refuses before it starts, and a live cluster."""

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from headwater.cli import main
from headwater.cluster.control import ClusterFolder, ControlServer
from headwater.testing.ports import free_port
from tests.cluster.commands import ClusterCommands
from tests.waiting import is_running, until


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "say how many instances"),
        (["--prefill", "1"], "need --decode instances"),
        (["--mixed", "2", "--gpus", "0"], "each of the 2 instances"),
        (["--mixed", "1", "--gpus", "first"], "each of the 1 instances"),
        (["--mixed", "2", "--instance-ports", "8200-8200"], "too few ports for 2 instances"),
        (["--mixed", "1", "--instance-ports", "some"], "give one port, as 8200"),
        (["--mixed", "1", "--gpus", "0", "--", "--device", "cpu"], "leave one out"),
        (["--mixed", "1", "--gpus", "0", "--", "--device=cpu"], "leave one out"),
    ],
)
def test_up_refuses_invalid_flags_and_starts_nothing(flags, words, capsys):
    """There is a message, and an exit code other than 0."""
    assert main(["up", *flags]) == 1

    assert words in capsys.readouterr().err


def test_a_command_without_a_name_means_the_only_cluster_that_runs(
    tmp_path, monkeypatch, capsys
):
    """While two clusters run, the command is refused and names both, so that `down` never stops
    the wrong one."""
    monkeypatch.setenv("HEADWATER_STATE", str(tmp_path))
    stopped = []

    def start(name):
        folder = ClusterFolder(name)
        folder.make()

        def answer(command):
            stopped.append(name)
            servers[name].close()
            command.answer({"name": name})

        servers[name] = ControlServer(folder.socket, answer)

    servers = {}
    start("default-2")
    assert main(["down"]) == 0
    assert stopped == ["default-2"]
    start("default-2")
    start("default")
    capsys.readouterr()
    assert main(["down"]) == 1
    assert "2 clusters are running: default, default-2; choose" in capsys.readouterr().err
    assert main(["down", "--cluster", "default"]) == 0
    assert main(["down"]) == 0
    assert stopped == ["default-2", "default", "default-2"]
    assert main(["down"]) == 1
    sentence = "no cluster named 'default' is running; headwater up starts one\n"
    assert capsys.readouterr().err.endswith(sentence)


@pytest.mark.slow
def test_a_cluster_has_fixed_ports_a_key_and_takes_an_instance_by_hand():
    """The printed command, unchanged, adds an instance; the key protects router and
    instances."""
    port = free_port()
    environment = {k: v for k, v in os.environ.items() if k != "HEADWATER_PEER_TOKEN"}
    flags = [
        "--mixed",
        "1",
        "--port",
        "0",
        "--instance-ports",
        str(port),
        "--api-key",
        "k" * 32,
    ]
    tiny = ["--num-gpu-blocks-override", "32", "--threads", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "headwater", "up", *flags, "--", *tiny],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as cluster:
        assert cluster.stdout is not None
        lines = []
        for line in cluster.stdout:
            lines.append(line.strip())
            if line.startswith("stop with"):
                break
        url = next(line.split()[-1] for line in lines if "cluster is ready" in line)
        command = next(line for line in lines if line.startswith("headwater serve"))
        by_hand = subprocess.Popen(
            [sys.executable, "-m", *shlex.split(command)],
            stdout=subprocess.DEVNULL,
            env=environment | {"HEADWATER_API_KEY": "k" * 32},
        )
        headers = {"authorization": "Bearer " + "k" * 32}
        try:
            urls = instances_of(url, headers, wanted=2)
            refused = httpx.get(f"http://127.0.0.1:{port}/v1/models")
        finally:
            by_hand.terminate()
            by_hand.wait()
            cluster.terminate()
            cluster.stdout.read()

    assert f"http://127.0.0.1:{port}" in urls
    assert refused.status_code == 401
    [asks] = [line for line in lines if "/v1/chat/completions" in line]
    assert asks.startswith('curl -H "Authorization: Bearer $HEADWATER_API_KEY"')
    assert '"max_tokens": 20' in asks
    assert "add or replace an instance, with the same HEADWATER_API_KEY:" in lines


def instances_of(url, headers, *, wanted, field="url"):
    """The URLs, or another field, of the registered instances, once there are this many."""
    deadline = time.monotonic() + 120
    while True:
        found = httpx.get(f"{url}/instances", headers=headers).json()["instances"]
        if len(found) >= wanted:
            return [entry[field] for entry in found]
        assert time.monotonic() < deadline


def test_down_returns_when_the_cluster_has_ended(tmp_path, monkeypatch, capsys):
    """The next `up` finds the name and the ports free."""
    monkeypatch.setenv("HEADWATER_STATE", str(tmp_path))
    folder = ClusterFolder("default")
    folder.make()
    ended = []

    def end():
        ended.append(True)
        server.close()

    def answer(command):
        command.answer({"name": "default"})
        threading.Timer(0.3, end).start()

    server = ControlServer(folder.socket, answer)
    assert main(["down"]) == 0
    assert ended
    assert capsys.readouterr().out.splitlines()[-1] == "cluster default has ended"


class LocalCluster(ClusterCommands):
    """`headwater up -f FILE` with one instance, and the commands that an operator gives."""

    def __init__(self, folder, *, is_killed=False):
        """With `is_killed`, `headwater up` is not asked to stop at the end."""
        self._is_killed = is_killed
        self.file, self.state = folder / "cluster.yaml", folder / "state"
        self.write_file(flags="num-gpu-blocks-override: 32, threads: 1")
        self._environment = os.environ | {"HEADWATER_STATE": str(self.state)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater", "up", "-f", str(self.file)],
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment,
        )
        assert self.process.stdout is not None
        self._lines = self.process.stdout

    def __enter__(self):
        try:
            self.read_until("stop with")
        except AssertionError:
            self.process.kill()
            raise
        return self

    def __exit__(self, kind, error, trace):
        with self._lines as lines:
            if self._is_killed:
                self.process.kill()
                self.process.wait()
                return
            self.ask("down")
            rest = lines.read()
        assert self.process.wait(timeout=90) == 0, rest

    def write_file(self, flags):
        self.file.write_text(
            "roles: {mixed: {count: 1}}\nrouters: {port: 0}\nrestart: {first_delay_s: 0.1}\n"
            f"flags: {{{flags}}}\n"
        )

    def until_state(self, name, state, run=1):
        """Wait until this start of a process has this state."""
        until(
            lambda: (
                self.members()[name]["state"] == state
                and self.ask("logs", name).count("is ready at") == run
            ),
            within_s=120,
        )

    def read_until(self, text):
        """Read the lines of `headwater up` until one has `text`."""
        for line in self._lines:
            if text in line:
                return
        raise AssertionError(f"the cluster ended before it said {text!r}")


@pytest.mark.slow
def test_a_killed_instance_comes_back_and_the_cluster_can_be_steered(tmp_path):
    """The cluster comes from a file; the test uses kill -9, status, scale, logs and down, as an
    operator would."""
    with LocalCluster(tmp_path) as cluster:
        url = cluster.members()["router"]["url"]
        os.kill(int(cluster.members()["mixed-1"]["place"].split()[1]), signal.SIGKILL)
        cluster.read_until("mixed-1 is ready again")
        named = instances_of(url, {}, wanted=1, field="instance_id")
        cluster.ask("scale", "mixed=2")
        instances_of(url, {}, wanted=2)
        listed = cluster.ask("status")
        log = cluster.ask("logs", "mixed-1")

    assert named == ["mixed-1"]
    assert "mixed-2" in listed
    assert log.count("is ready at") == 2
    assert not list(cluster.state.rglob("control"))


@pytest.mark.slow
def test_an_operator_drains_an_instance_and_restarts_it_with_new_flags(tmp_path):
    """A drained instance stays down until it is restarted by name; a restart with a file uses the
    flags of the file."""

    def longest():
        url = cluster.members()["mixed-1"]["url"]
        return httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"]

    with LocalCluster(tmp_path) as cluster:
        before = longest()
        cluster.ask("drain", "mixed-1")
        cluster.until_state("mixed-1", "stopped")
        cluster.ask("restart", "mixed-1")
        cluster.until_state("mixed-1", "ready", run=2)
        cluster.ask("restart")
        cluster.until_state("mixed-1", "ready", run=3)
        cluster.write_file(flags="num-gpu-blocks-override: 32, threads: 1, max-model-len: 512")
        cluster.ask("restart", "-f", str(cluster.file))
        cluster.until_state("mixed-1", "ready", run=4)
        after = longest()

    assert before != after == 512


@pytest.mark.slow
def test_every_process_ends_when_up_is_killed(tmp_path):
    """After SIGKILL `headwater up` can stop neither its router nor its instance; they end by
    themselves."""
    with LocalCluster(tmp_path, is_killed=True) as cluster:
        pids = below(cluster.process.pid)
        cluster.process.kill()

    assert len(pids) >= 4, "router, instance, its engine and its worker"
    until(lambda: not any(map(is_running, pids)), within_s=60)


def below(pid):
    """The process ids of all descendants; each thread of a process may have children."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in lists for child in path.read_text().split()]
    return [one for child in children for one in (child, *below(child))]
