"""`headwater up`: what it refuses before it starts anything, and which GPU each instance sees."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from queue import SimpleQueue

import httpx
import pytest

from headwater.cli import main
from headwater.cli.up import Child
from tests.ports import free_port


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "say how many instances"),
        (["--prefill", "1"], "need --decode instances"),
        (["--mixed", "2", "--gpus", "0"], "2 instances need as many numbers"),
        (["--mixed", "1", "--gpus", "first"], "1 instances need as many numbers"),
        (["--mixed", "2", "--instance-ports", "8200-8200"], "no room for 2 instances"),
        (["--mixed", "1", "--instance-ports", "some"], "give one port, as 8200"),
        (["--mixed", "1", "--gpus", "0", "--", "--device", "cpu"], "leave one out"),
        (["--mixed", "1", "--gpus", "0", "--", "--device=cpu"], "leave one out"),
    ],
)
def test_nothing_is_started_where_it_makes_no_sense(flags, words, capsys):
    """A sentence, and an exit code that is not 0."""
    assert main(["up", *flags]) == 1

    assert words in capsys.readouterr().err


def test_an_instance_sees_its_own_gpu_and_no_other():
    """By the driver's own switch, so every library agrees."""
    child = Child("router", ["route", "--port", "0"], SimpleQueue(), gpu="5")
    seen = Path(f"/proc/{child.process.pid}/environ").read_bytes().split(b"\0")
    child.stop()
    child.wait()

    assert b"CUDA_VISIBLE_DEVICES=5" in seen


@pytest.mark.slow
def test_a_cluster_has_fixed_ports_a_key_and_takes_an_instance_by_hand():
    """The printed command, run as it is, adds an instance; the key guards router and instances."""
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
        said = []
        for line in cluster.stdout:
            said.append(line.strip())
            if line.startswith("stop with"):
                break
        url = next(line.split()[-1] for line in said if "cluster is ready" in line)
        command = next(line for line in said if line.startswith("headwater serve"))
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


def instances_of(url, headers, *, wanted):
    """The URLs of the registered instances, once there are this many."""
    deadline = time.monotonic() + 120
    while True:
        found = httpx.get(f"{url}/instances", headers=headers).json()["instances"]
        if len(found) >= wanted:
            return [entry["url"] for entry in found]
        assert time.monotonic() < deadline
