"""Every listening socket of a running cluster: on loopback, and closed to strangers."""

import contextlib
import os
import re
import socket
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from headwater.disagg.links.registry import Links
from headwater.testing.links import BlockArray, EventLog
from tests.disagg.wire import CONFIG
from tests.router.live import LiveCommand
from tests.security.test_kv_events import replayed

LISTEN = "0A"


@pytest.fixture(scope="module")
def cluster():
    command = LiveCommand(
        *("up", "--prefill", "1", "--decode", "1", "--port", "0", "--"),
        *("--max-model-len", "512", "--num-gpu-blocks-override", "32"),
        *("--api-workers", "2", "--tensor-parallel-size", "2", "--threads", "1"),
    )
    command.until_printed("cluster is ready", within_s=240)
    yield command
    command.stop()


@pytest.fixture(scope="module")
def listeners(cluster):
    """Addresses of the TCP listeners: those that speak HTTP, and the others. Silent listeners are
    waited for, so all are asked at once."""
    found = sorted(listening(processes(cluster.process.pid)))
    with ThreadPoolExecutor(len(found)) as threads:
        speak = list(threads.map(is_http, found))
    http = [entry for entry, spoken in zip(found, speak, strict=True) if spoken]
    return http, [entry for entry in found if entry not in http]


def processes(parent):
    """A process and everything it started, directly or not."""
    found, todo = [], [parent]
    while todo:
        pid = todo.pop()
        found.append(pid)
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            todo += [int(child) for child in path.read_text().split()]
    return found


def inodes(pid):
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(path)
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            yield int(target[8:-1])


def listening(pids):
    """(address, port) of every TCP socket on which one of the processes listens."""
    own = {inode for pid in pids for inode in inodes(pid)}
    found = set()
    for family in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[9]) in own:
                address, port = fields[1].split(":")
                raw = b"".join(
                    struct.pack("<I", int(address[at : at + 8], 16))
                    for at in range(0, len(address), 8)
                )
                kind = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
                found.add((socket.inet_ntop(kind, raw), int(port, 16)))
    return found


def unix_sockets(pids):
    """Paths of listening Unix sockets of the processes."""
    own = {inode for pid in pids for inode in inodes(pid)}
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return [entry[7] for entry in fields if len(entry) > 7 and int(entry[6]) in own]


def is_http(address):
    try:
        answer = httpx.get(f"http://{address[0]}:{address[1]}/health", timeout=5)
    except httpx.HTTPError:
        return False
    return answer.headers.get("content-type", "").startswith("application/json")


def poke(address):
    """What a listener answers to bytes of a stranger."""
    with socket.create_connection(address, timeout=5) as stranger:
        stranger.settimeout(5)
        stranger.sendall(b"\0" * 64)
        answer = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            while piece := stranger.recv(4096):
                answer += piece
    return answer


def test_every_listener_is_on_loopback(listeners):
    """Nothing of a default cluster, its HTTP workers and its ranks can be reached from another
    host."""
    http, others = listeners
    assert len(http) == 3
    assert {address for address, _ in http + others} <= {"127.0.0.1", "::1"}


def test_http_listeners_refuse_unauthenticated_clients(listeners):
    """HTTP listeners refuse a registration without the token, control from web pages, and a
    foreign Host."""
    for address, port in listeners[0]:
        url = f"http://{address}:{port}"
        registered = httpx.post(f"{url}/instances", json={}, timeout=5)
        assert registered.status_code in (403, 404), registered.text
        paused = httpx.post(
            f"{url}/v1/pause", headers={"origin": "http://evil.example"}, timeout=5
        )
        assert paused.status_code in (403, 404), paused.text
        named = httpx.get(f"{url}/v1/models", headers={"host": "evil.example"}, timeout=5)
        assert named.status_code == 421


def test_other_listeners_refuse_clients_without_the_secret(cluster, listeners):
    """Peers, block links, KV events and ranks: a stranger gets no prompt, no block and no event,
    and the cluster goes on."""
    others = listeners[1]
    assert len(others) >= 12  # of each instance: peers, links, events, replays and two ranks
    with ThreadPoolExecutor(len(others)) as threads:
        answers = list(threads.map(poke, others))
    assert max(map(len, answers)) < 256  # a greeting at most
    for address, port in others:
        assert replayed(f"tcp://{address}:{port}", within_ms=500) is None
    found = re.search(r"cluster is ready at (\S+)", "".join(cluster.lines))
    assert found is not None
    body = {"prompt": "still there", "max_tokens": 2}
    answered = httpx.post(f"{found.group(1)}/v1/completions", json=body, timeout=60)
    assert answered.status_code == 200, answered.text


@pytest.mark.parametrize("link", ["shm", "cuda"])
def test_the_abstract_socket_of_a_link_gives_nothing_without_the_secret(link):
    """Every user of the machine can reach the socket: a stranger gets at most a greeting, and
    no memory."""
    receiver = Links(CONFIG, BlockArray(1, 64), EventLog()).listen(link)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(5)
        stranger.connect("\0" + receiver.address.removeprefix(f"{link}://"))
        stranger.sendall(b"\0" * 82)  # as long as an answer to the challenge
        answer, files = b"", []
        with contextlib.suppress(TimeoutError, ConnectionError):
            while True:
                piece, found, *_ = socket.recv_fds(stranger, 4096, 8)
                files += found
                if not piece:
                    break
                answer += piece
    receiver.close()
    assert len(answer) < 256
    assert not files


def test_unix_sockets_are_in_folders_of_this_user(cluster):
    """The sockets of the engines and of the cluster's control can be reached by their user
    only. Links have abstract sockets, which authenticate (the test above)."""
    found = unix_sockets(processes(cluster.process.pid))
    assert {Path(path).name for path in found} >= {"engine-0", "control"}
    for path in found:
        if re.fullmatch(r"@headwater-[0-9a-f]{16}", path):
            continue
        assert not path.startswith("@"), "every user of the machine can reach it"
        folder = Path(path).parent
        if folder.exists():
            assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0, path
