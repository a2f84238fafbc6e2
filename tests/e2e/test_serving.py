"""A live server with unusual clients: disconnecting, flooding, pausing, resetting."""

import json
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live import LiveServer

pytestmark = pytest.mark.slow


def test_the_command_of_the_banner_gives_a_short_answer(server):
    """The first command that a user pastes asks for few tokens: random weights rarely end an
    answer."""
    command = next(
        line for line in server.lines if line.strip().startswith("curl") and "-d" in line
    )
    ran = subprocess.run([*shlex.split(command), "-s"], capture_output=True, check=True)

    assert 0 < json.loads(ran.stdout)["usage"]["completion_tokens"] <= 20


def test_a_disconnected_client_frees_its_slots(server):
    """Lesson 58: closing the connection in mid-stream ends the work; every slot is returned."""
    stream = server.open_stream(max_tokens=4000, prompt="a stream that is not read to its end")
    assert stream.next() is not None
    assert server.get("/cache").json()["num_running"] == 1

    stream.close()

    device = server.until_idle()["tiers"]["device"]
    assert device["held"] == 0
    assert device["free"] + device["cached"] == device["num_blocks"]


def test_reset_under_load_changes_no_token(server):
    """Lesson 59: resetting the cache while requests run disturbs none of them."""
    fields = {"max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    prompt = "a prompt of a hundred tokens and some more, told while the cache is reset " * 2

    def ids():
        return server.complete(prompt=prompt, **fields).json()["choices"][0]["token_ids"]

    alone = ids()
    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(ids) for _ in range(8)]
        while not all(task.done() for task in running):
            assert server.post("/reset_prefix_cache").json()["status"] == "done"
        assert all(task.result() == alone for task in running)
    assert server.until_idle()["tiers"]["device"]["held"] == 0


def test_pause_and_resume(server):
    """Lesson 58: during a pause a new request waits and a running one continues."""
    running = server.open_stream(max_tokens=600)
    running.next()
    server.post("/v1/pause")

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.complete, max_tokens=2)
        server.until(lambda state: state["num_waiting"] > 0)
        assert running.rest()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.get("/cache").json()["is_paused"]
        assert not waiting.done()
        server.post("/v1/resume")
        assert waiting.result().status_code == 200
    running.close()


def test_abort_by_name(server):
    """Lesson 58: a request can be aborted from another connection, and its client gets the
    reason."""
    stream = server.open_stream(max_tokens=4000, request_id="long-one")
    stream.next()

    assert server.post("/v1/abort_requests", {"request_ids": ["long-one"]}).json() == {
        "aborted": 1
    }

    assert stream.rest()[-1]["choices"][0]["finish_reason"] == "abort"
    stream.close()
    assert server.until_idle()["tiers"]["device"]["held"] == 0


def test_the_http_process_has_no_torch(server):
    """Neither torch nor transformers is loaded where HTTP is served; the engine has them."""
    server.complete()

    def loaded(pid):
        return "/torch/" in Path(f"/proc/{pid}/maps").read_text()

    assert server.worker_pids
    assert not any(map(loaded, (server.process.pid, *server.worker_pids)))
    assert loaded(server.engine_pid)


def test_metrics_of_a_live_server(server):
    """Scraped metrics come from both processes."""
    server.complete(max_tokens=3)

    text = server.get("/metrics").text

    assert "headwater:generation_tokens_total" in text
    assert "headwater:engine_steps_total" in text
    assert (
        'headwater:cache_config_info{block_size="64",num_cpu_blocks="0",num_gpu_blocks="128"}'
        in text
    )


@pytest.fixture(scope="module")
def small():
    server = LiveServer(
        *("--api-key", "sesame", "--max-num-seqs", "1", "--max-queued-requests", "0"),
        *("--max-num-batched-tokens", "256", "--max-body-mib", "0.01"),
        *("--served-model-name", "spring", "--write-policy", "write_back"),
    ).wait_ready()
    yield server
    assert server.stop() == 0, server.errors


KEY = {"authorization": "Bearer sesame"}


def test_the_key_is_asked_for(small):
    """Without the key, every path except /health is a 401."""
    assert small.get("/v1/models").status_code == 401
    assert small.post("/v1/completions", {"prompt": "a"}).status_code == 401
    assert small.get("/health").status_code == 200
    assert small.get("/v1/models", headers=KEY).json()["data"][0]["id"] == "spring"


def test_a_flag_without_effect_is_noted_at_start(small):
    """Lesson 34: --write-policy without a host tier is noted when the server starts."""
    assert any("--write-policy does nothing here" in line for line in small.lines)


def test_a_long_body_is_a_413(small):
    """Lesson 68: more than the limit is refused, whole or in pieces."""
    body = {"prompt": "x" * 20_000}
    assert small.post("/v1/completions", body, headers=KEY).status_code == 413


def test_a_full_queue_is_a_429(small):
    """One request runs and none may wait, so the next is refused with Retry-After."""
    options: dict[str, Any] = {"headers": KEY, "timeout": 60}
    body = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", small.url + "/v1/completions", json=body, **options) as first:
        lines = first.iter_lines()  # kept: an iterator that is dropped closes the connection
        assert next(lines).startswith("data: ")
        second = small.post("/v1/completions", {"prompt": "b"}, headers=KEY)
        assert second.status_code == 429
        assert second.headers["retry-after"] == "1"
    small.until(lambda state: not state["num_running"], headers=KEY)
    assert small.post("/v1/completions", {"prompt": "b"}, headers=KEY).status_code == 200
