"""A server whose engine has several ranks: what clients and operators see when one is lost."""

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.live import LiveServer, Stream
from tests.e2e.test_disagg import TOKEN, complete, ids
from tests.waiting import is_running, until


def _rank_pids(server: LiveServer) -> list[int]:
    """Children of the running engine."""
    pid = server.process.pid
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        below = Path(f"/proc/{child}/task/{child}/children").read_text().split()
        found += [one for one in below if b"rank_process" in _command(one)]
    return [int(one) for one in found]


def _command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.nightly
def test_clients_get_an_error_for_a_lost_rank_and_the_engine_restarts_with_its_host_tier() -> (
    None
):
    """The stream ends with an error that names the rank. A new engine with new ranks adopts the
    host tier and gives the same output; in the end nothing is left."""
    server = LiveServer("--tensor-parallel-size", "2", "--swap-space", "0.1").wait_ready()
    prompt = "a prompt of more than one block " * 8
    before = server.complete(prompt=prompt, max_tokens=8).json()["choices"][0]["text"]
    (rank,) = _rank_pids(server)
    stream = server.open_stream(prompt="hello", max_tokens=8000)
    stream.next()

    os.kill(rank, signal.SIGKILL)

    error = stream.rest()[-1]["error"]
    stream.close()
    assert error["code"] == "engine_dead"
    assert error["message"] == "rank 1 of 2 failed: its process was killed by SIGKILL"
    server.until_healthy()
    (new_rank,) = _rank_pids(server)
    assert new_rank != rank
    again = server.complete(prompt=prompt, max_tokens=8)
    assert again.json()["choices"][0]["text"] == before
    assert server.stop() == 0
    assert not Path(f"/proc/{new_rank}").exists()
    log = "".join(server.errors)
    assert "host tier adopted" in log
    assert "terminate called" not in log


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_other_ranks_end_with_rank_0(number: int) -> None:
    """Rank 0 is the engine process. When it is killed, or stopped until the supervisor kills it
    after a minute, the stream ends with an error, the other rank is gone, and a new engine
    serves."""
    server = LiveServer("--tensor-parallel-size", "2").wait_ready()
    (rank,) = _rank_pids(server)
    stream = Stream(server.url, {"max_tokens": 8000}, timeout_s=180)
    stream.next()

    os.kill(server.engine_pid, number)

    error = stream.rest()[-1]["error"]
    stream.close()
    assert error["code"] == "engine_dead"
    until(lambda: not is_running(rank))
    server.until_healthy(within_s=240)
    assert server.complete().status_code == 200
    assert server.stop() == 0


@pytest.mark.nightly
def test_two_ranks_prefill_for_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode instance gives the tokens of one rank that does everything, in two turns of a
    conversation."""
    monkeypatch.setenv("HEADWATER_PEER_TOKEN", TOKEN)
    prefill = LiveServer("--splitwise-role", "prefill", "--tensor-parallel-size", "2")
    decode = LiveServer("--splitwise-role", "decode", "--tensor-parallel-size", "4")
    alone = LiveServer()
    servers = [server.wait_ready() for server in (prefill, decode, alone)]
    address = prefill.get("/server_info").json()["engine"]["peer_address"]
    headers = {"x-headwater-prefill": address, "x-headwater-peer-token": TOKEN}
    prompt = [(at * 37) % 251 for at in range(300)]
    for _ in range(2):
        handed_off = ids(complete(decode, prompt, headers))
        assert handed_off == ids(complete(alone, prompt))
        prompt = prompt + handed_off + prompt[:70]

    for server in servers:
        assert server.stop() == 0, server.errors
