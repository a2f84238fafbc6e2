"""An engine killed at any moment: its host tier is found again, and no token is wrong."""

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer
from tests.storage.conftest import RedisServer
from tests.waiting import is_running, until

pytestmark = pytest.mark.slow

FLAGS = ("--swap-space", "0.05", "--block-size", "16", "--max-model-len", "4096")
NUM_PROMPTS = 24


def prompt(number):
    rng = random.Random(number)
    return "A river begins at a spring. " * 4 + "".join(rng.choices("abcdefgh ", k=500))


def ask(server, number):
    """Token ids of a prompt, and how many of its tokens were cached; None for an error."""
    answer = server.complete(
        prompt=prompt(number), max_tokens=12, ignore_eos=True, return_token_ids=True
    )
    if answer.status_code != 200:
        return None
    body = answer.json()
    details = body["usage"]["prompt_tokens_details"]
    return body["choices"][0]["token_ids"], details["cached_tokens"]


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def engine_of(server):
    (found,) = [
        pid
        for pid in children(server.process.pid)
        if b"launch.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return found


def host_blocks(server):
    return server.get("/cache").json()["tiers"]["host"]["cached"]


def kill_engine(server):
    """Kill the engine and wait for the next one; return the seconds until that one answered a
    request."""
    victim = engine_of(server)
    begin_s = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    until(
        lambda: engine_of_or_none(server) not in (victim, None) and ask(server, 0) is not None,
        within_s=120,
    )
    return time.monotonic() - begin_s


def engine_of_or_none(server):
    try:
        return engine_of(server)
    except (ValueError, OSError):
        return None


def shared_memory():
    return set(os.listdir("/dev/shm"))


def test_a_killed_engine_leaves_its_host_tier_to_the_next():
    """An engine is killed while it serves: at least 0.95 of the host blocks are found again,
    prompts give the same tokens, and nothing is left when the supervisor is killed too."""
    before = shared_memory()
    server = LiveServer(*FLAGS, "--api-workers", "2", blocks=160).wait_ready()
    truth = [ask(server, number)[0] for number in range(NUM_PROMPTS)]
    known = host_blocks(server)
    with ThreadPoolExecutor(4) as threads:
        load = threads.map(lambda number: ask(server, number), range(NUM_PROMPTS))
        time.sleep(0.2)
        kill_engine(server)
        for found, tokens in zip(load, truth, strict=True):
            assert found is None or found[0] == tokens
    assert known > 100
    assert host_blocks(server) >= 0.95 * known
    found = [ask(server, number) for number in range(NUM_PROMPTS)]
    assert [tokens for tokens, _ in found] == truth
    assert sum(cached for _, cached in found) > 0

    processes = [server.process.pid, *children(server.process.pid)]
    server.process.kill()
    server.wait()
    until(lambda: not any(map(is_running, processes)))
    assert shared_memory() <= before
    assert not [path for pid in processes for path in held_memory(pid)]


def held_memory(pid):
    folder = Path(f"/proc/{pid}/fd")
    if not folder.exists():
        return []
    return [link for link in folder.iterdir() if "memfd:headwater" in os.readlink(link)]


def test_an_engine_restarts_though_its_storage_is_gone(tmp_path):
    """A wrong address is an error at the first start; a server that went away later is not."""
    redis = RedisServer(tmp_path)
    config = json.dumps({"url": redis.url})
    server = LiveServer(
        *FLAGS, "--kvcache-storage-backend", "redis", "--kvcache-storage-config", config
    ).wait_ready()
    redis.stop()

    kill_engine(server)

    assert server.complete(max_tokens=4).status_code == 200
    assert server.stop() == 0
    assert "storage is not open yet, requests are served without it" in "".join(server.errors)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_fifty_kills_at_random_moments_give_no_wrong_token():
    """The server is under load; HEADWATER_KILLS changes the number of kills."""
    rng = random.Random(int(os.environ.get("HEADWATER_SEED", "0")))
    num_kills = int(os.environ.get("HEADWATER_KILLS", "50"))
    server = LiveServer(*FLAGS, "--max-engine-restarts", "1000", blocks=160).wait_ready()
    truth = [ask(server, number)[0] for number in range(NUM_PROMPTS)]
    shares, loads = [], []
    for _ in range(num_kills):
        known = host_blocks(server)
        with ThreadPoolExecutor(4) as threads:
            asked = rng.choices(range(NUM_PROMPTS), k=12)
            load = threads.map(lambda number: ask(server, number), asked)
            time.sleep(rng.random() * 2.0)
            loads.append(kill_engine(server))
            for number, found in zip(asked, load, strict=True):
                assert found is None or found[0] == truth[number]
        shares.append(host_blocks(server) / known)
    found = [ask(server, number) for number in range(NUM_PROMPTS)]
    assert [tokens for tokens, _ in found] == truth
    assert min(shares) >= 0.95, shares
    assert server.stop() == 0
