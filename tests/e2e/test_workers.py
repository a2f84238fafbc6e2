"""Several HTTP workers on one port: each answers for all of them, and a dead one is
replaced."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.live import LiveServer
from tests.waiting import until

pytestmark = pytest.mark.slow

KEY, ADMIN = "key-of-a-client-0123", "key-of-an-admin-0123"
TRIES = 12
"""New connections: enough to reach each of three workers."""


def headers(key):
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write_keys(path, max_concurrency=2)
    return path


@pytest.fixture(scope="module")
def server(keys_file):
    server = LiveServer("--api-workers", "3", "--api-keys-file", str(keys_file)).wait_ready()
    yield server
    if server.process.poll() is None:
        server.stop()


def write_keys(path, **limits):
    keys = [
        {"name": "client", "key": KEY, **limits},
        {"name": "admin", "key": ADMIN, "scopes": ["admin", "client", "metrics"]},
    ]
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)


def metric(server, name):
    """The value of a series, from any worker."""
    found = set()
    for _ in range(TRIES):
        text = server.get("/metrics", headers=headers(ADMIN)).text
        found |= {line for line in text.splitlines() if line.startswith(f"headwater:{name} ")}
    assert len(found) == 1, found
    return float(found.pop().rpartition(" ")[2])


def test_counts_are_one_answer_and_survive_a_worker(server):
    """/metrics sums all workers; when one is killed, its counts stay and it is replaced."""
    before = metric(server, "generation_tokens_total")
    for _ in range(TRIES):
        assert server.complete(max_tokens=3, headers=headers(KEY)).status_code == 200
    assert metric(server, "generation_tokens_total") == before + 3 * TRIES

    pids = server.worker_pids
    assert len(pids) == 3
    os.kill(pids[1], signal.SIGKILL)
    assert metric(server, "generation_tokens_total") == before + 3 * TRIES
    until(lambda: len(set(server.worker_pids) - set(pids)) == 1)
    recent = server.get("/stats", headers=headers(ADMIN)).json()["recent"]
    assert recent == sorted(recent, key=lambda e: -(e["start_unix_s"] + e["duration_s"]))


def test_history_is_the_same_from_every_worker(server):
    """The supervisor keeps the points; a client key may read them, a request without a key may
    not."""

    def history():
        return server.get("/stats/history", headers=headers(KEY)).json()["points"]

    until(history)
    first = history()[0]
    assert all(history()[0] == first for _ in range(TRIES))
    assert server.get("/stats/history").status_code == 401


def test_the_limit_of_a_key_holds_over_all_workers(server, keys_file):
    """With two requests in flight on any workers, each worker refuses the third."""
    streams = [server.open_stream(max_tokens=4000, headers=headers(KEY)) for _ in range(2)]
    for stream in streams:
        assert stream.status == 200
        stream.next()
    for _ in range(TRIES):
        refused = server.complete(headers=headers(KEY))
        assert refused.json()["error"]["code"] == "concurrency_limit"
    own = server.get("/stats", headers=headers(KEY))
    assert own.status_code == 429
    write_keys(keys_file, max_concurrency=8)
    server.process.send_signal(signal.SIGHUP)
    until(lambda: server.complete(max_tokens=1, headers=headers(KEY)).status_code == 200)
    for _ in range(TRIES):
        shown = server.get("/stats", headers=headers(KEY)).json()["sequences"]
        assert len(shown) == 2

    aborted = server.post("/v1/abort_requests", {"abort_all": True}, headers=headers(KEY))
    assert aborted.json() == {"aborted": 2}
    for stream in streams:
        assert stream.rest()[-1]["choices"][0]["finish_reason"] == "abort"
        stream.close()


def test_a_request_is_aborted_by_its_name_through_any_worker(server):
    """The worker that has the request is found."""
    for number in range(4):
        name = f"long-{number}"
        stream = server.open_stream(max_tokens=4000, request_id=name, headers=headers(ADMIN))
        stream.next()
        answer = server.post(
            "/v1/abort_requests", {"request_ids": [name]}, headers=headers(ADMIN)
        )
        assert answer.json() == {"aborted": 1}
        assert stream.rest()[-1]["choices"][0]["finish_reason"] == "abort"
        stream.close()


def test_a_stored_response_is_found_by_every_worker(server):
    """The response is found at once, and after the worker that stored it is gone; each tenant
    finds only its own."""
    body = {"input": "hello", "max_output_tokens": 2}
    for _ in range(TRIES):
        made = server.post("/v1/responses", body, headers=headers(KEY)).json()
        found = server.get(f"/v1/responses/{made['id']}", headers=headers(KEY))
        assert found.json() == made
    follow = body | {"previous_response_id": made["id"]}
    assert server.post("/v1/responses", follow, headers=headers(KEY)).status_code == 200
    assert server.get(f"/v1/responses/{made['id']}", headers=headers(ADMIN)).status_code == 404
    assert server.post("/v1/responses", follow, headers=headers(ADMIN)).status_code == 404
    httpx.delete(f"{server.url}/v1/responses/{made['id']}", headers=headers(KEY))
    for _ in range(TRIES):
        gone = server.get(f"/v1/responses/{made['id']}", headers=headers(KEY))
        assert gone.status_code == 404


def test_the_streams_of_other_workers_go_on_when_one_is_killed(server):
    """The requests of the dead worker are aborted in the engine; nothing stays held."""
    streams = [server.open_stream(max_tokens=300, headers=headers(ADMIN)) for _ in range(6)]
    for stream in streams:
        stream.next()
    os.kill(server.worker_pids[0], signal.SIGKILL)

    ends = []
    for stream in streams:
        try:
            ends.append(stream.rest()[-1]["choices"][0]["finish_reason"])
        except OSError:
            ends.append("cut")
        stream.close()
    assert set(ends) <= {"length", "cut"}
    server.until(
        lambda state: not state["num_running"] and not state["tiers"]["device"]["held"],
        headers=headers(ADMIN),
    )


def test_a_drain_waits_for_the_streams_of_all_workers(server):
    """The log of the drain has the number of running streams. This is the last test, because it
    stops the server."""
    streams = [server.open_stream(max_tokens=200, headers=headers(ADMIN)) for _ in range(5)]
    for stream in streams:
        stream.next()
    server.process.send_signal(signal.SIGTERM)
    with ThreadPoolExecutor(5) as threads:
        ends = list(threads.map(lambda s: s.rest()[-1]["choices"][0]["finish_reason"], streams))
    assert ends == ["length"] * 5
    for stream in streams:
        stream.close()
    assert server.wait() == 0
    assert "drain begun: running=5" in "".join(server.errors)
