"""Every listening socket of a running cluster: on loopback, and closed to strangers."""

import contextlib
import os
import socket
import stat
import struct
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
    )
    command.until_said("cluster is ready", within_s=240)
    yield command
    command.stop()


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


def test_every_listener_is_on_loopback(cluster):
    """Nothing of a default cluster can be reached from another host."""
    found = listening(processes(cluster.process.pid))
    assert len(found) >= 3
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}


def test_http_listeners_refuse_strangers(cluster):
    """No registration without the token, no control from web pages, no foreign Host."""
    http = [entry for entry in listening(processes(cluster.process.pid)) if is_http(entry)]
    assert len(http) == 3
    for address, port in http:
        url = f"http://{address}:{port}"
        registered = httpx.post(f"{url}/instances", json={}, timeout=5)
        assert registered.status_code in (403, 404), registered.text
        paused = httpx.post(
            f"{url}/v1/pause", headers={"origin": "http://evil.example"}, timeout=5
        )
        assert paused.status_code in (403, 404), paused.text
        named = httpx.get(f"{url}/v1/models", headers={"host": "evil.example"}, timeout=5)
        assert named.status_code == 421


def test_other_listeners_answer_nobody_without_the_secret(cluster):
    """Peers, block links and KV events: a stranger gets no prompt, no block and no event."""
    others = [
        entry for entry in listening(processes(cluster.process.pid)) if not is_http(entry)
    ]
    assert len(others) >= 6  # peers, events and replays of two instances
    for address, port in others:
        assert replayed(f"tcp://{address}:{port}", within_ms=500) is None
        with socket.create_connection((address, port), timeout=5) as stranger:
            stranger.settimeout(5)
            stranger.sendall(b"\0" * 64)
            answer = b""
            try:
                while piece := stranger.recv(4096):
                    answer += piece
            except (TimeoutError, ConnectionError):
                pass
        assert len(answer) < 256  # a greeting at most


def test_the_abstract_socket_of_the_shm_link_gives_nothing_without_the_secret():
    """Every user of the machine can reach it: a stranger gets a greeting at most, and no
    memory."""
    receiver = Links(CONFIG, BlockArray(1, 64), EventLog()).listen("shm")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(5)
        stranger.connect("\0" + receiver.address.removeprefix("shm://"))
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
    """The engine's own socket can be reached by its user only."""
    for path in unix_sockets(processes(cluster.process.pid)):
        assert not path.startswith("@"), "every user of the machine can reach it"
        folder = Path(path).parent
        if folder.exists():
            assert stat.S_IMODE(folder.stat().st_mode) & 0o077 == 0, path
