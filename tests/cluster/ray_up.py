"""`headwater up --ray` and clients of its router, for tests on a real Ray cluster."""

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

from tests.cluster.commands import ClusterCommands
from tests.cluster.ray_nodes import node_address
from tests.waiting import until

logging.getLogger("httpx").setLevel(logging.WARNING)  # one line a request hides the figures

NEEDS_RAY = pytest.mark.skipif(
    util.find_spec("ray") is None or "HEADWATER_NIGHTLY" not in os.environ,
    reason="needs Ray (pip install 'headwater[ray]') and minutes; scripts/nightly runs it",
)


def complete(url, headers, prompt):
    """Send a request; return the reason if it failed."""
    body = {"prompt": prompt, "max_tokens": 24, "ignore_eos": True}
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    except httpx.HTTPError as exc:
        return repr(exc)
    return None if answer.status_code == 200 else answer.text


def stream(url, headers, prompt):
    """Read a stream to its end; return the reason if it was not complete."""
    body = {"prompt": prompt, "max_tokens": 600, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    events: list[str] = []
    try:
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=120
        ) as answer:
            events.extend(line[6:] for line in answer.iter_lines() if line[:6] == "data: ")
    except httpx.HTTPError as exc:
        return f"{exc!r} after {len(events)} events"
    if answer.status_code != 200 or events[-1:] != ["[DONE]"]:
        return f"status {answer.status_code}, ends with {events[-1:]}"
    usage = json.loads(events[-2])["usage"]
    return None if usage["completion_tokens"] == 600 else f"not complete: {usage}"


class Load:
    """Clients that send requests until they are stopped, and the failures."""

    def __init__(self, url, headers, num_clients=3, ask=complete):
        self.url, self.headers, self._send = url, headers, ask
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
            failure = self._send(self.url, self.headers, prompt)
            if failure is None:
                self.num_done += 1
            else:
                self.failed.append(failure)

    def stop(self):
        self._stopping.set()
        for thread in self._threads:
            thread.join(120)


class RayCluster(ClusterCommands):
    """`headwater up --ray`, and the commands that control it."""

    def __init__(self, address, folder, text, *, until_line="stop with"):
        """`address` of Ray's head, and the text of the cluster file. Returns when `up` has said
        `until_line`."""
        file = folder / "cluster.yaml"
        file.write_text(text.replace("ADDRESS", node_address()))
        began_s = time.monotonic()
        self._environment = os.environ | {
            "HEADWATER_STATE": str(folder / "state"),
            "HEADWATER_API_KEY": "k" * 32,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headwater", "up", "-f", str(file), "--ray", address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment,
        )
        assert self.process.stdout is not None
        self._output = self.process.stdout
        self.lines: list[str] = []
        for line in self._output:
            self.lines.append(line)
            if until_line in line:
                break
        self._reader = threading.Thread(
            target=self.lines.extend, args=(self._output,), daemon=True
        )
        self._reader.start()
        assert self.process.poll() is None, self.lines
        self.start_s = time.monotonic() - began_s

    def until_ready(self, count, within_s=240):
        deadline = time.monotonic() + within_s
        while True:
            found = self.members()
            if len(found) == count and all(m["state"] == "ready" for m in found.values()):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(1)

    def kill(self, name):
        """Kill the process of an instance or a router with SIGKILL."""
        os.kill(process_id(self.members()[name]), signal.SIGKILL)

    def until_back(self, name, starts, within_s=120):
        """Wait until the process is ready after so many further starts; return the seconds."""
        began_s = time.monotonic()
        until(lambda: self.members()[name]["restarts"] >= starts, within_s=within_s)
        until(lambda: self.members()[name]["state"] == "ready", within_s=within_s)
        return time.monotonic() - began_s

    def down(self):
        self.ask("down")
        assert self.process.wait(timeout=120) == 0, self.lines
        self.close()

    def close(self):
        """Kill `up` if it still runs, and read the rest of its output."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self._output.close()


HEADERS = {"authorization": "Bearer " + "k" * 32}


def assert_nothing_left(pids):
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)


def process_id(member):
    return int(member["place"].split()[1])
