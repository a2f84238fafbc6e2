"""Prefill and decode as separate processes: killed, stopped and disconnected at each
message."""

import os
import signal
import threading
from contextlib import closing

import httpx
import pytest

from headwater.clock import SystemClock
from tests.disagg.proxy import HoldingProxy
from tests.e2e.live import LiveServer
from tests.still import stopped
from tests.waiting import until

pytestmark = pytest.mark.slow

TOKEN = "a-token-for-tests"
LEASE_S = 3.0
STEPS = {
    "accepted": ("to_d", 1),
    "ask": ("to_d", 2),
    "grant": ("to_p", 3),
    "first": ("to_d", 3),
    "done": ("to_p", 4),
}
"""The frame number of each message in a successful hand-off."""


def nightly(step: str):
    """A step for the long runs only: each death costs the start of a process."""
    return pytest.param(step, marks=pytest.mark.nightly)


class Cluster:
    """A decode instance, and prefill instances that may be killed."""

    def __init__(self) -> None:
        self.decode = self.start("decode")
        self.prefill = self.start("prefill")
        self.decode.wait_ready()
        self.prefill.wait_ready()
        self.number = 0

    def start(self, role: str) -> LiveServer:
        return LiveServer("--splitwise-role", role, "--peer-lease", str(LEASE_S), blocks=96)

    def restart(self, server: LiveServer, role: str) -> None:
        """Start another instance of this role after one was killed."""
        server.stop(signal.SIGKILL)
        fresh = self.start(role).wait_ready()
        if role == "prefill":
            self.prefill = fresh
        else:
            self.decode = fresh

    def proxy(self, step: str = "") -> HoldingProxy:
        way, stop = STEPS.get(step, ("", -1))
        return HoldingProxy(self.peer_address(), way=way, stop=stop)

    def peer_address(self) -> str:
        address: str = self.prefill.get("/server_info").json()["engine"]["peer_address"]
        return address

    def prompt(self) -> list[int]:
        """Three blocks and a half that no request has used."""
        self.number += 1
        return [self.number] * 7 + [(at * self.number) % 251 for at in range(217)]

    def stop(self) -> None:
        for server in (self.decode, self.prefill):
            if server.process.poll() is None:
                assert server.stop() == 0, server.errors


@pytest.fixture(scope="module")
def cluster():
    os.environ["HEADWATER_PEER_TOKEN"] = TOKEN
    cluster = Cluster()
    yield cluster
    cluster.stop()
    del os.environ["HEADWATER_PEER_TOKEN"]


class Asking:
    """A request in another thread, and later its answer."""

    def __init__(self, server: LiveServer, prompt: list[int], address: str, fallback: str = ""):
        headers = {"x-headwater-prefill": address, "x-headwater-peer-token": TOKEN}
        if fallback:
            headers["x-headwater-fallback"] = fallback
        self._call = (server, prompt, headers)
        self.answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        server, prompt, headers = self._call
        try:
            self.answer = complete(server, prompt, headers)
        except httpx.TransportError:
            return

    def end(self, within_s: float) -> httpx.Response | None:
        """The answer; None if the server died. AssertionError if it hangs."""
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "a request hangs"
        return self.answer


def complete(server: LiveServer, prompt: list[int], headers: dict[str, str] | None = None):
    body = {
        "prompt": prompt,
        "max_tokens": 10,
        "temperature": 1.0,
        "seed": 3,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)


def ids(answer: httpx.Response | None) -> list[int]:
    assert answer is not None
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    assert len(tokens) == 10
    return tokens


def until_balanced(server: LiveServer) -> None:
    """Wait until nothing is held and no hand-off is in flight, within a few terms."""
    end_s = SystemClock().now() + 4 * LEASE_S
    while True:
        lines = server.get("/metrics").text.splitlines()
        busy = [
            line
            for line in lines
            if line.startswith(
                ("headwater:pd_handoffs_in_flight", 'headwater:tier_blocks{state="held"')
            )
            and not line.endswith(" 0.0")
        ]
        if not busy:
            return
        assert SystemClock().now() < end_s, busy


def test_a_hand_off_between_processes_yields_the_tokens_of_one(cluster):
    """Wrong values of the hand-off headers are refused, too."""
    prompt = cluster.prompt()
    address = cluster.peer_address()
    there = ids(Asking(cluster.decode, prompt, address).end(30))

    assert there == ids(complete(cluster.decode, prompt))
    for server in (cluster.decode, cluster.prefill):
        until_balanced(server)
    metrics = cluster.decode.get("/metrics").text
    assert 'headwater:pd_handoffs_total{side="decode"} 1.0' in metrics
    refused = complete(cluster.prefill, prompt)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "prefill_only")
    headers = {"x-headwater-prefill": address, "x-headwater-peer-token": "guess"}
    assert complete(cluster.decode, prompt, headers).status_code == 403
    headers = {"x-headwater-prefill": "no address", "x-headwater-peer-token": TOKEN}
    assert complete(cluster.decode, prompt, headers).status_code == 400
    for secret in (cluster.decode.get("/server_info").text, "".join(cluster.decode.lines)):
        assert TOKEN not in secret


def test_a_missing_instance_is_a_typed_refusal_or_a_local_prefill(cluster):
    """The header `x-headwater-fallback` decides whether the request is refused or its prompt is
    computed by D."""
    prompt = cluster.prompt()
    refused = Asking(cluster.decode, prompt, "127.0.0.1:1").end(30)
    assert refused is not None
    assert refused.status_code == 503
    assert refused.json()["error"]["type"] == "peer_refused"
    assert refused.json()["error"]["code"] == "unreachable"

    here = ids(Asking(cluster.decode, prompt, "127.0.0.1:1", fallback="local").end(30))
    assert here == ids(complete(cluster.decode, prompt))


@pytest.mark.parametrize("step", [nightly("accepted"), "ask", nightly("grant"), "first"])
def test_a_killed_p_costs_time_and_nothing_else(cluster, step):
    """After kill -9 at each message, D's client gets its tokens, and D's slots are returned."""
    prompt = cluster.prompt()
    with closing(cluster.proxy(step)) as proxy:
        asking = Asking(cluster.decode, prompt, proxy.address, fallback="local")
        assert proxy.is_held.wait(30)
        os.kill(cluster.prefill.engine_pid, signal.SIGKILL)
        tokens = ids(asking.end(30))
    until_balanced(cluster.decode)
    cluster.restart(cluster.prefill, "prefill")

    assert tokens == ids(complete(cluster.decode, prompt))


@pytest.mark.parametrize("step", [nightly("ask"), "grant", nightly("done")])
def test_a_killed_d_leaves_nothing_on_p(cluster, step):
    """After kill -9 at each message, P ends its part of the hand-off, frees all its blocks, and
    serves the next request."""
    prompt = cluster.prompt()
    with closing(cluster.proxy(step)) as proxy:
        asking = Asking(cluster.decode, prompt, proxy.address)
        assert proxy.is_held.wait(30)
        os.kill(cluster.decode.engine_pid, signal.SIGKILL)
        asking.end(30)
    until_balanced(cluster.prefill)
    cluster.restart(cluster.decode, "decode")
    address = cluster.peer_address()

    assert ids(Asking(cluster.decode, prompt, address).end(30))


def test_a_stopped_p_is_given_up_after_a_term_and_back_later(cluster):
    """After SIGSTOP the lease expires and D computes; when P continues, it is told that the
    hand-off is over."""
    prompt = cluster.prompt()
    with closing(cluster.proxy("grant")) as proxy:
        asking = Asking(cluster.decode, prompt, proxy.address)
        assert proxy.is_held.wait(30)
        with stopped(cluster.prefill.engine_pid):
            proxy.go.set()
            tokens = ids(asking.end(4 * LEASE_S))
        for server in (cluster.decode, cluster.prefill):
            until_balanced(server)

    metrics = cluster.decode.get("/metrics").text
    assert 'headwater:pd_leases_expired_total{side="decode"} 1.0' in metrics
    assert tokens == ids(complete(cluster.decode, prompt))


def test_a_stopping_prefill_instance_completes_its_hand_offs(cluster):
    """Lesson 59: after SIGTERM in the middle of a hand-off, the hand-off ends normally, and
    then P ends."""
    prompt, prefill = cluster.prompt(), cluster.prefill
    before = failures(cluster.decode)
    with closing(cluster.proxy("grant")) as proxy:
        asking = Asking(cluster.decode, prompt, proxy.address)
        assert proxy.is_held.wait(30)
        prefill.process.send_signal(signal.SIGTERM)
        until_draining(prefill)
        assert prefill.process.poll() is None
        proxy.go.set()
        tokens = ids(asking.end(30))
        assert prefill.wait() == 0, prefill.errors
    after = failures(cluster.decode)
    cluster.prefill = cluster.start("prefill").wait_ready()

    assert after == before
    assert tokens == ids(complete(cluster.decode, prompt))


def failures(server: LiveServer) -> list[str]:
    """Every count of a hand-off that failed."""
    lines = server.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith("headwater:pd_failures_total{")]


def until_draining(server: LiveServer) -> None:
    """Wait until the server refuses new requests because it stops."""
    until(lambda: server.get("/health").status_code == 503, within_s=20)


def test_a_request_gets_its_tokens_after_a_lost_connection(cluster):
    """Both instances live on; the hand-off ends, and the request gets its tokens."""
    prompt = cluster.prompt()
    proxy = cluster.proxy("first")
    asking = Asking(cluster.decode, prompt, proxy.address)
    assert proxy.is_held.wait(30)
    proxy.cut()
    tokens = ids(asking.end(30))
    proxy.close()
    for server in (cluster.decode, cluster.prefill):
        until_balanced(server)

    assert tokens == ids(complete(cluster.decode, prompt))
