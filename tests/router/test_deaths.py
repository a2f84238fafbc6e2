"""A router that is killed at each step of a request, and requests that are given back to it.

Real processes: a router, a prefill and two decode instances. A step is held by stopping the
process that the request waits for.
"""

import http.client
import json
import os
import re
import signal
import threading
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.live import Stream
from tests.router.separate import LEASE_S, Separate, ids
from tests.still import stopped
from tests.waiting import until

pytestmark = pytest.mark.slow

TOKEN = "a-token-for-tests"
NAME = "x-headwater-instance"
LONG = "the water of a mountain spring, "
MOST = 900
"""Tokens of each of two answers that do not fit together on one instance."""

BROKEN = (OSError, http.client.HTTPException)
"""Errors that a client sees when its router is gone."""


@pytest.fixture(scope="module")
def cluster():
    os.environ["HEADWATER_PEER_TOKEN"] = TOKEN
    cluster = Separate()
    yield cluster
    cluster.stop()
    del os.environ["HEADWATER_PEER_TOKEN"]


@pytest.fixture
def prompt(request) -> str:
    """Long enough to be handed off, and not cached anywhere."""
    return f"{request.node.name}: " + LONG * 12


def check(cluster: Separate, prompt: str) -> None:
    """Nothing is left of the dead router's requests; another router knows all instances within
    a few heartbeats, and serves the same tokens as an instance alone."""
    cluster.until_balanced()
    cluster.restart_router()
    routed = cluster.ask(prompt=prompt)
    assert routed.status_code == 200, routed.text
    alone = cluster.ask(cluster.decoding[0].url, prompt=prompt)
    assert routed.json()["choices"] == alone.json()["choices"]
    cluster.until_balanced()


def count(url: str, series: str) -> float:
    """One series of /metrics; 0 if it is not there yet."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    found = [line for line in lines if line.startswith(f"headwater:{series} ")]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


def test_a_router_killed_before_it_forwards(cluster, prompt):
    """The killed router waits for a prompt's tokens: no instance has the request, and none ever
    gets it."""
    place = urlsplit(cluster.router.url)
    client = http.client.HTTPConnection(place.hostname or "", place.port, timeout=20)
    with stopped(*(pid for server in cluster.decoding for pid in server.worker_pids)):
        client.request("POST", "/v1/completions", json.dumps({"prompt": prompt}))
        for _ in range(2):  # what came before these was read by then
            known = cluster.router.instances()
        assert {entry["num_alive"] for entry in known.values()} == {0}
        cluster.kill_router()
        with pytest.raises(BROKEN):
            client.getresponse()
    client.close()

    check(cluster, prompt)


def test_a_router_killed_while_a_prompt_is_handed_over(cluster, prompt):
    """The killed router waits for D, which waits for P: both are told that the request was
    aborted."""
    with stopped(cluster.prefill.engine_pid):
        asking = cluster.ask_aside(prompt=prompt)
        handed = 'pd_handoffs_in_flight{side="decode"}'
        until(lambda: sum(count(server.url, handed) for server in cluster.decoding) == 1)
        cluster.kill_router()
        assert asking.end().error is not None

    check(cluster, prompt)


@pytest.mark.parametrize("num_events", [1, 8])
def test_a_router_killed_while_a_stream_goes_through_it(cluster, prompt, num_events):
    """The client's connection and the request end, whether the router dies at the first token
    or later."""
    stream = cluster.stream(prompt=prompt, max_tokens=700)
    for _ in range(num_events):
        assert stream.next()["choices"]
    cluster.kill_router()
    read_to_its_end(stream)

    check(cluster, prompt)


def test_a_returned_request_continues_on_another_instance(cluster, prompt):
    """Lesson 55: a request that was preempted, had no room for three terms and was given back
    to the router continues on another instance after its last token; the client sees one
    stream."""
    prompt = prompt[:160]
    home = cluster.home(cluster.ask(prompt=prompt, max_tokens=1).headers[NAME])
    other = next(server for server in cluster.decoding if server is not home)
    routed = f'router_routed_total{{instance="{cluster.name(other)}",trust="exact"}}'
    before = count(cluster.router.url, routed)

    pieces = outgrow(cluster, home, prompt)

    assert count(cluster.router.url, routed) == before + 1
    assert ids(pieces) == alone(cluster, prompt)
    assert [p["choices"][0]["finish_reason"] for p in pieces].count("length") == 1


def test_a_router_killed_while_a_stream_is_taken_up_elsewhere(cluster, prompt):
    """D is gone and another instance has the stream, but has not sent anything yet."""
    stream = cluster.stream(prompt=prompt, max_tokens=700)
    assert stream.next()["choices"]
    busy = [name for name, entry in cluster.router.instances().items() if entry["num_alive"]]
    victim = next(server for server in cluster.decoding if cluster.name(server) in busy)
    other = next(server for server in cluster.decoding if server is not victim)
    with stopped(other.engine_pid):
        os.kill(victim.engine_pid, signal.SIGKILL)
        victim.process.kill()
        victim.wait()
        cluster.router.until(lambda known: known[cluster.name(other)]["num_alive"] == 1)
        cluster.kill_router()
        read_to_its_end(stream)

    check(cluster, prompt)


@pytest.mark.nightly
def test_a_returned_request_continues_on_its_instance_if_there_is_no_other(cluster, prompt):
    """Lesson 55: the returned request continues after the request that preempted it has ended,
    without an error."""
    (home,), prompt = cluster.decoding, prompt[:160]
    cluster.ask(prompt=prompt, max_tokens=1)

    pieces = outgrow(cluster, home, prompt)

    assert ids(pieces) == alone(cluster, prompt)


def read_to_its_end(stream: Stream) -> None:
    """Read until the connection ends; bytes in transit may still arrive before."""
    with pytest.raises(BROKEN):
        stream.rest()
    stream.close()


def outgrow(cluster: Separate, home, prompt: str):
    """Let two streams need more memory than one instance has; return the events of the
    later one."""
    preempted = count(home.url, "num_preemptions_total")
    first = cluster.stream(prompt=prompt + "a", max_tokens=MOST)
    second = cluster.stream(prompt=prompt + "b", max_tokens=MOST)
    pieces = [second.next()]
    until(lambda: count(home.url, "num_preemptions_total") > preempted)
    with stopped(home.engine_pid):
        threading.Event().wait(3.5 * LEASE_S)  # time passes, and no request gets room
    pieces += second.rest()
    assert ids(first.rest())
    for stream in (first, second):
        stream.close()
    metrics = httpx.get(f"{cluster.router.url}/metrics", timeout=30).text
    assert re.search(r'router_failures_total{.*reason="returned"} ', metrics), metrics
    return pieces


def alone(cluster: Separate, prompt: str) -> list[int]:
    """The tokens of the later of the two streams of `outgrow`, computed alone."""
    cluster.until_balanced()
    answer = cluster.ask(prompt=prompt + "b", max_tokens=MOST)
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens
