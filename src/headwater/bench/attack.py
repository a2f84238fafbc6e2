"""`headwater bench attack`: hostile bytes at every listener of a cluster, for some minutes.

A router, a prefill and a decode instance run with few file descriptors and limited memory. Clients
send malformed HTTP and JSON, truncated and reordered frames of ZMQ, peers and block links, slow and
abandoned requests. The run fails when a process ends, when `/health` or a plain request is not
answered in time, when a status of 500 or above other than 503 is sent, or when memory grows.

Memory is compared between the middle and the end of the run, each as a median over a tenth of
it. Before the middle it may grow: the allocator keeps an arena for each thread and the largest
blocks it ever freed, and parsers, stores and caches fill up to their limits.
"""

import json
import random
import sys
import threading
import urllib.error
import urllib.request
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from headwater.bench._flags import read_flags
from headwater.bench._hostile_bytes import FRAME_ATTACKS, HTTP_ATTACKS, AttackTarget
from headwater.bench._live_cluster import (
    LiveCluster,
    live_cluster,
    processes_of,
    socket_inodes,
)
from headwater.bench._report import print_report
from headwater.clock import SystemClock
from headwater.errors import EngineDead

_FLAGS = ("--prefill", "1", "--decode", "1", "--", "--threads", "1")
_SERVE_FLAGS = ("--cache-transfer-protocol", "tcp", "--num-gpu-blocks-override", "64")
_MAX_FILES = 512
_MAX_MEMORY_KIB = 8 << 20
_HTTP_SHARE = 0.6
_NUM_CLIENTS = 6
_CHECK_S = 2.0
_ANSWER_S = 30.0
_RETRY_S = 0.2
_MAX_GROWTH = 0.02
"""Largest growth of a process from the middle of the run to its end, as a share of its memory."""

_MIN_SAMPLES = 60
"""Two minutes. A process with fewer samples is still warming up."""

_SLACK_BYTES = 4 << 20
"""Growth below this is noise: bodies that are worked on when a sample is taken."""


def main(argv: Sequence[str]) -> int:
    """Run the attacks and print a table or JSON; return 1 if something failed."""
    parser = ArgumentParser(prog="headwater bench attack", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="duration of the attack (default: 10)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the attacks (default: 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = read_flags(parser, argv)
    # Few descriptors and little memory, so that attacks reach the limits.
    limits = f"ulimit -n {_MAX_FILES}; ulimit -v {_MAX_MEMORY_KIB}"
    wrapper = ("bash", "-c", f'{limits}; exec "$@"', "limited")
    with live_cluster([*_FLAGS, *_SERVE_FLAGS], wrapper=wrapper) as cluster:
        run = AttackRun(cluster, options.seed)
        result = run.run(options.minutes * 60)
    print_report("headwater bench attack", result, as_json=options.json)
    if run.faults:
        sys.stderr.write("".join(f"broken: {fault}\n" for fault in run.faults))
    return 1 if run.faults else 0


class AttackRun:
    """Clients that attack, and one that watches."""

    def __init__(self, cluster: LiveCluster, seed: int) -> None:
        self.faults: list[str] = []
        self._cluster = cluster
        self._seed = seed
        self._clock = SystemClock()
        self._stop = threading.Event()
        self._statuses: Counter[str] = Counter()
        self._targets = _targets(cluster)
        self._sizes: dict[tuple[str, int], list[int]] = {}
        """Resident bytes of each process, by its name and number."""

    def run(self, duration_s: float) -> dict[str, Any]:
        """Attack for this long; return what was sent, answered and measured."""
        threads = [
            threading.Thread(target=self._attack, args=(random.Random(f"{self._seed}/{n}"),))
            for n in range(_NUM_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        begin_s = self._clock.now()
        try:
            while self._clock.now() - begin_s < duration_s and not self.faults:
                self._check()
                self._stop.wait(_CHECK_S)
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        self._check_memory()
        return {
            "seconds": self._clock.now() - begin_s,
            "listeners": len(self._targets),
            "attacks": sum(self._statuses.values()),
            "statuses": dict(sorted(self._statuses.items())),
            "memory_mib": {
                f"{name} {pid}": [_mib(_level(sizes, at)) for at in (0.05, 0.5, 0.95)]
                for (name, pid), sizes in sorted(self._sizes.items())
            },
            "faults": len(self.faults),
        }

    def _attack(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            is_http = rng.random() < _HTTP_SHARE
            target = rng.choice([t for t in self._targets if t.is_http == is_http])
            attack = rng.choice(HTTP_ATTACKS if target.is_http else FRAME_ATTACKS)
            status = attack(rng, target.address)
            self._statuses["none" if status is None else str(status)] += 1
            if status is not None and status >= 500 and status != 503:
                self.faults.append(f"{attack.__name__} at {target.name} got status {status}")

    def _check(self) -> None:
        """Check that every process lives and answers, and measure its memory."""
        for child in self._cluster.children.values():
            for pid in processes_of(child.pid):
                size = _resident_bytes(pid)
                if size:
                    name = f"{child.name} {_module(pid)}"
                    self._sizes.setdefault((name, pid), []).append(size)
            if not processes_of(child.pid):
                self.faults.append(f"{child.name} has ended")
                return
        try:
            for child in self._cluster.children.values():
                _answer(f"{child.url}/health", None)
            body = {"prompt": "are you there", "max_tokens": 2}
            _answer(f"{self._cluster.router.url}/v1/completions", body)
        except OSError as error:
            self.faults.append(f"a plain request failed: {error}")

    def _check_memory(self) -> None:
        for (name, pid), sizes in self._sizes.items():
            middle, end = _level(sizes, 0.5), _level(sizes, 0.95)
            if len(sizes) < _MIN_SAMPLES:
                continue
            if end - middle > max(_SLACK_BYTES, _MAX_GROWTH * middle):
                self.faults.append(
                    f"memory of {name} {pid} grew from {_mib(middle)} to {_mib(end)} MiB"
                )


def _targets(cluster: LiveCluster) -> list[AttackTarget]:
    """Every TCP listener of the cluster's processes."""
    http = {child.port: child.name for child in cluster.children.values()}
    found = []
    for child in cluster.children.values():
        inodes = {inode for pid in processes_of(child.pid) for inode in socket_inodes(pid)}
        for port in _listening_ports(inodes):
            name = http.get(port, f"{child.name} port {port}")
            found.append(
                AttackTarget(name=name, address=("127.0.0.1", port), is_http=port in http)
            )
    if len(found) <= len(http):
        raise EngineDead("the listeners of the cluster were not found in /proc")
    return found


def _listening_ports(inodes: set[str]) -> list[int]:
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [line for line in lines if line[3] == "0A" and line[9] in inodes]
    return sorted({int(line[1].partition(":")[2], 16) for line in listening})


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError):
        return 0


def _module(pid: int) -> str:
    """The module that a process runs."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "ended"
    names = [after for word, after in pairwise(words) if word == b"-m"]
    return names[0].decode().rpartition(".")[2] if names else "other"


def _level(sizes: Sequence[int], at: float) -> float:
    """The median over a tenth of the samples. Their middle is at this share of the run."""
    reach = max(1, len(sizes) // 20)
    middle = round(at * len(sizes))
    return median(sizes[max(0, middle - reach) : middle + reach])


def _mib(num_bytes: float) -> float:
    return round(num_bytes / (1 << 20), 1)


def _answer(url: str, body: dict[str, Any] | None) -> None:
    """Raises OSError unless the request is answered with 200 in time. After a 503 the request is
    repeated, as a client would do."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    clock, pause = SystemClock(), threading.Event()
    deadline_s = clock.now() + _ANSWER_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:
                answer.read()
            return
        except urllib.error.HTTPError as error:
            if error.code != 503 or clock.now() > deadline_s:
                raise
        pause.wait(_RETRY_S)
