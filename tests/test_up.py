"""`headwater up`: what it refuses before it starts, and a live cluster."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import httpx
import pytest

from headwater.cli import main
from headwater.cluster.control import ClusterFolder, ControlServer
from headwater.testing.ports import free_port


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
    """With two of them it is refused and names both, so that `down` never stops the wrong one."""
    monkeypatch.setenv("HEADWATER_STATE", str(tmp_path))
    stopped = []

    def start(name):
        folder = ClusterFolder(name)
        folder.make()

        def answer(command):
            stopped.append(name)
            command.answer({"name": name})

        return ControlServer(folder.socket, answer)

    one = start("default-2")
    assert main(["down"]) == 0
    assert stopped == ["default-2"]
    other = start("default")
    capsys.readouterr()
    assert main(["down"]) == 1
    assert "2 clusters are running: default, default-2; choose" in capsys.readouterr().err
    assert main(["down", "--cluster", "default"]) == 0
    assert stopped == ["default-2", "default"]
    one.close()
    other.close()
    assert main(["down"]) == 1
    assert "no cluster named 'default' is running" in capsys.readouterr().err


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


def instances_of(url, headers, *, wanted, field="url"):
    """The URLs, or another field, of the registered instances, once there are this many."""
    deadline = time.monotonic() + 120
    while True:
        found = httpx.get(f"{url}/instances", headers=headers).json()["instances"]
        if len(found) >= wanted:
            return [entry[field] for entry in found]
        assert time.monotonic() < deadline


@pytest.mark.slow
def test_a_killed_instance_comes_back_and_the_cluster_can_be_steered(tmp_path):
    """The cluster comes from a file; the test uses kill -9, status, scale, logs and down, as an
    operator would."""
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "roles: {mixed: {count: 1}}\nrouters: {port: 0}\nrestart: {first_delay_s: 0.1}\n"
        "flags: {num-gpu-blocks-override: 32, threads: 1}\n"
    )
    environment = os.environ | {"HEADWATER_STATE": str(tmp_path / "state")}

    def headwater(*words):
        command = [sys.executable, "-m", "headwater", *words]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def members():
        return {m["name"]: m for m in json.loads(headwater("status", "--json"))["members"]}

    with subprocess.Popen(
        [sys.executable, "-m", "headwater", "up", "-f", str(file)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as cluster:
        assert cluster.stdout is not None
        try:
            until(cluster, "stop with")
            url = members()["router"]["url"]
            os.kill(int(members()["mixed-1"]["place"].split()[1]), signal.SIGKILL)
            until(cluster, "mixed-1 is ready again")
            named = instances_of(url, {}, wanted=1, field="instance_id")
            headwater("scale", "mixed=2")
            instances_of(url, {}, wanted=2)
            listed = headwater("status")
            log = headwater("logs", "mixed-1")
        finally:
            headwater("down")
            rest = cluster.stdout.read()
        assert cluster.wait(timeout=90) == 0, rest

    assert named == ["mixed-1"]
    assert "mixed-2" in listed
    assert log.count("is ready at") == 2
    assert not list((tmp_path / "state").rglob("control"))


def until(cluster, text):
    """Read the cluster's lines until one has `text`."""
    for line in cluster.stdout:
        if text in line:
            return
    raise AssertionError(f"the cluster ended before it said {text!r}")
