"""Host and storage tiers of a live server, as an operator and a client see them."""

import json
import re
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.e2e.live import LiveServer
from tests.ties import log_near_ties

pytestmark = pytest.mark.slow

ASK = {
    "max_tokens": 4,
    "ignore_eos": True,
    "logprobs": 2,
    "return_token_ids": True,
    "cache_details": True,
}


def make_prompt(number: int) -> str:
    """Ten blocks of 64 tokens and a rest; another number gives other tokens."""
    return f"prompt {number}: " + " ".join(str(number * n) for n in range(200))


def ask(server: LiveServer, number: int, **fields: Any) -> tuple[list[int], dict[str, Any]]:
    """The tokens of an answer, and the sources of its prompt tokens."""
    answer = server.complete(prompt=make_prompt(number), **ASK, **fields).json()
    details = answer["usage"]["prompt_tokens_details"]
    cache = details["cache"]
    assert details["cached_tokens"] == sum(cache[t] for t in ("device", "host", "storage"))
    log_near_ties(answer["choices"][0])
    return answer["choices"][0]["token_ids"], cache


def until_written(server: LiveServer, link: str) -> dict[str, Any]:
    """Wait until nothing is being written; return the state of /cache."""
    while True:
        state: dict[str, Any] = server.get("/cache").json()
        links = state["links"]
        if link in links and not any(entry["in_flight"] for entry in links.values()):
            return state


def test_a_prompt_that_the_device_evicted_comes_back_from_the_host():
    """Lessons 14, 64: the banner says what fills the tier, and the usage names the source of
    the hit."""
    server = LiveServer("--swap-space", "0.25", blocks=24).wait_ready()
    first, _ = ask(server, 1)
    again, on_device = ask(server, 1)
    until_written(server, "device_to_host")
    for number in range(2, 5):
        ask(server, number)

    tokens, cache = ask(server, 1, load_policy="wait")
    state = server.get("/cache").json()
    refused = server.complete(load_policy="sometimes")
    scraped = server.get("/metrics").text
    code = server.stop()

    assert first == again == tokens
    assert on_device["device"] > 0
    assert cache["host"] > 0
    assert cache["device"] == 0
    load = cache["load"]
    assert (load["choice"], load["host_blocks"]) == ("policy_wait", load["num_blocks"])
    assert load["waited_s"] > 0
    assert state["ledger"]["recent_loads"][-1] == load
    assert state["prices"]["prefill_tokens_s"] > 0
    assert state["prices"]["host_to_device"]["block_s"] > 0
    assert refused.status_code == 400
    assert on_device["load"] is None
    assert state["tiers"]["host"]["cached"] > 0
    assert state["ledger"]["found_tokens"]["host"] == cache["host"]
    assert 'headwater:transfer_bytes_total{link="host_to_device"}' in scraped
    assert 'headwater:tier_blocks{state="cached",tier="host"}' in scraped
    assert any("is written to it before it leaves the device" in line for line in server.lines)
    assert code == 0, server.errors


def test_a_split_is_seen_by_the_client_and_in_the_ledger():
    """The head is loaded and the tail is computed, because by the prices in /cache only some
    blocks can meet the deadline. The answer reports how many blocks were chosen, and the cost
    of all."""
    server = LiveServer("--swap-space", "0.25", blocks=24).wait_ready()
    right, _ = ask(server, 1)
    ask(server, 1)
    until_written(server, "device_to_host")
    server.post("/reset_prefix_cache", {"tiers": ["device"]})
    ask(server, 1, load_policy="wait")
    server.post("/reset_prefix_cache", {"tiers": ["device"]})
    prices = server.get("/cache").json()["prices"]
    link = prices["host_to_device"]
    timeout_s = link["latency_s"] + 4.5 * link["block_s"]

    tokens, cache = ask(server, 1, load_timeout_s=timeout_s)
    state = server.get("/cache").json()
    code = server.stop()

    load = cache["load"]
    assert tokens == right
    assert load["choice"] == "split"
    assert (load["num_blocks"], load["host_blocks"]) == (4, 10)
    assert load["load_s"] <= timeout_s < load["chosen_s"] < load["recompute_s"]
    assert state["ledger"]["load_choices"]["split"] == 1
    assert state["ledger"]["recent_loads"][-1] == load
    assert code == 0, server.errors


def test_an_idle_server_with_tiers_sleeps(tmp_path):
    """Lesson 15: no thread of the engine wakes to check whether a copy has ended."""
    server = LiveServer(
        *("--swap-space", "0.25", "--write-policy", "write_through"),
        *("--kvcache-storage-backend", "file", "--kvcache-storage-config"),
        json.dumps({"path": str(tmp_path), "capacity_bytes": "64MiB", "reserve_bytes": 0}),
    ).wait_ready()
    ask(server, 1)
    until_written(server, "host_to_storage")

    quietest = min(wake_ups_in(server, 0.5) for _ in range(5))
    code = server.stop()

    assert quietest <= 5
    assert code == 0, server.errors


def wake_ups_in(server: LiveServer, seconds: float) -> int:
    """How often threads of the engine woke up in a time without requests."""
    before = num_wake_ups(server.engine_pid)
    Event().wait(seconds)
    return num_wake_ups(server.engine_pid) - before


def num_wake_ups(pid: int) -> int:
    """How often threads of a process have woken so far: about as often as they gave up the
    processor."""
    counts = [
        re.search(r"^voluntary_ctxt_switches:\s+(\d+)", path.read_text(), re.MULTILINE)
        for path in Path(f"/proc/{pid}/task").glob("*/status")
    ]
    return sum(int(found.group(1)) for found in counts if found)


def test_a_restarted_server_hits_on_its_first_request(tmp_path):
    """A new process on the same directory finds with its first request what the earlier process
    wrote."""
    flags = (
        *("--swap-space", "0.25", "--write-policy", "write_through"),
        *("--kvcache-storage-backend", "file", "--kvcache-storage-config"),
        json.dumps({"path": str(tmp_path), "capacity_bytes": "64MiB", "reserve_bytes": 0}),
    )
    server = LiveServer(*flags).wait_ready()
    before, cold = ask(server, 1)
    state = until_written(server, "host_to_storage")
    assert server.stop() == 0, server.errors

    restarted = LiveServer(*flags).wait_ready()
    after, warm = ask(restarted, 1)
    assert restarted.stop() == 0, restarted.errors

    assert cold["storage"] == 0
    assert state["storage"]["blocks_written"] > 0
    assert before == after
    assert warm["storage"] > 0
    assert warm["miss_reason"] is None
    assert any("storage file" in line for line in restarted.lines)


def test_a_server_that_is_stopped_after_an_answer_has_stored_its_prompt(tmp_path):
    """The tutorial's promise with default settings: stopped at once, all whole blocks are
    found after a restart."""
    flags = (
        *("--swap-space", "0.1", "--kvcache-storage-backend", "file"),
        *("--kvcache-storage-config", json.dumps({"path": str(tmp_path)})),
    )
    server = LiveServer(*flags).wait_ready()
    ask(server, 1)
    assert server.stop() == 0, server.errors

    restarted = LiveServer(*flags).wait_ready()
    _, warm = ask(restarted, 1, load_policy="wait")
    assert restarted.stop() == 0, restarted.errors

    assert warm["storage"] == 640
    assert warm["recomputed"] < 64


def test_tiers_are_forgotten_while_requests_run(tmp_path):
    """Lesson 59: memory is reset, then storage too; running streams end with the right
    tokens."""
    server = LiveServer(
        *("--swap-space", "0.25", "--write-policy", "write_through", "--load-policy", "wait"),
        *("--kvcache-storage-backend", "file", "--kvcache-storage-config"),
        json.dumps({"path": str(tmp_path), "capacity_bytes": "64MiB", "reserve_bytes": 0}),
    ).wait_ready()
    alone, _ = ask(server, 1)
    written = until_written(server, "host_to_storage")["storage"]["blocks_written"]
    streams = [server.open_stream(prompt=make_prompt(n), max_tokens=60) for n in (2, 3)]
    for stream in streams:
        stream.next()

    memory = server.post("/reset_prefix_cache").json()
    stored, from_storage = ask(server, 1)
    alone_refused = server.post("/reset_prefix_cache", {"tiers": ["storage"]})
    everything = server.post("/reset_prefix_cache", {"tiers": ["device", "host", "storage"]})
    again, from_nowhere = ask(server, 1)
    texts = ["".join(e["choices"][0]["text"] for e in stream.rest()) for stream in streams]
    for stream in streams:
        stream.close()
    after = server.until_idle()
    code = server.stop()

    assert alone == stored == again
    assert memory["removed"]["device"] > 0
    assert from_storage["storage"] >= 10 * 64
    assert alone_refused.status_code == 400
    assert everything.json()["removed"]["storage"] >= written
    assert from_nowhere["storage"] == from_nowhere["host"] == from_nowhere["device"] == 0
    assert all(texts)
    assert after["tiers"]["device"]["held"] == 0
    assert code == 0, server.errors


def test_a_server_whose_storage_is_dead_serves():
    """Lesson 38: a store that refuses every connection costs hits; no request fails."""
    server = LiveServer(
        *("--swap-space", "0.25", "--write-policy", "write_through"),
        *("--kvcache-storage-backend", "tests.e2e.dead:DeadStorage"),
    ).wait_ready()

    answers = [ask(server, number) for number in (1, 2, 1)]
    failures = server.get("/cache").json()["links"]["lookup"]["failures"]
    code = server.stop()

    assert answers[0][0] == answers[2][0]
    assert answers[2][1]["device"] > 0
    assert failures
    assert code == 0, server.errors
