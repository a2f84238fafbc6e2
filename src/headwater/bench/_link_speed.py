"""Speed of each link against the simplest way to do the same, measured alternately with two
processes.

    python -m headwater.bench._link_speed [--quick] [--tls CERTFILE KEYFILE CA_CERTS]

`tcp` runs against a bare socket, `shm` against memcpy, `mooncake` against bare Transfer Engine
calls. `tcp` and `mooncake` verify the bytes, so their ceilings also read the bytes once on each
side. `shm` copies once, directly from the peer's blocks, and so does memcpy. With `--tls` the
`tcp` link is measured without and with mutual TLS, in turns.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from statistics import median
from threading import Event
from typing import Any

import numpy as np

from headwater.bench._link_far import DONE, MARK, Blocks, bare_engine, link_config
from headwater.clock import SystemClock
from headwater.disagg.links.interface import Sender
from headwater.disagg.links.registry import Links
from headwater.disagg.protocol.push import BlockPiece, LinkEvent, Push, PushDone
from headwater.storage.calls import address_of
from headwater.storage.codec import checksum

_BLOCK_BYTES = 1 << 20
_NUM_BLOCKS = 64
_NUM_PAIRS = 5
"""Receiving processes per link: one pair of processes can be a fifth faster than another, for
its whole life."""

_WARM_UP = 3
"""Warm-up turns of each pair."""

_WRITE_BYTES = 2 << 20
"""Bytes of one plain write; larger ones were not faster."""

_TIMEOUT_S = 60.0


def measure_links(quick: bool) -> dict[str, float]:
    """`link_ratio`: the speed of each link over its ceiling's, the median of all turns."""
    return {link: figures["ratio"] for link, figures in _measure_speeds(quick).items()}


def _measure_speeds(quick: bool) -> dict[str, dict[str, float]]:
    """For each link, `ratio`, `mb_s` and `ceiling_mb_s`: the medians of all turns."""
    links = ["tcp", "shm", *(["mooncake"] if find_spec("mooncake") else [])]
    return {link: _measure(link, *((1, 5) if quick else (_NUM_PAIRS, 9))) for link in links}


def _measure_tls(files: Sequence[str], quick: bool) -> dict[str, float]:
    """MB/s of the `tcp` link without and with TLS, their ratio, and the sender's processor time
    per MB, which does not depend on what else the machine does; the median of all turns."""
    num_pairs, num_turns = (1, 5) if quick else (_NUM_PAIRS, 9)
    plain, encrypted = [], []
    plain_cpu: list[float] = []
    encrypted_cpu: list[float] = []
    for _ in range(num_pairs):
        plain += [ours for ours, _ in _turns("tcp", num_turns, (), plain_cpu)]
        encrypted += [ours for ours, _ in _turns("tcp", num_turns, files, encrypted_cpu)]
    megabytes = _NUM_BLOCKS * _BLOCK_BYTES / 1e6
    plain_mb_s, tls_mb_s = megabytes / median(plain), megabytes / median(encrypted)
    return {
        "tcp_mb_s": plain_mb_s,
        "tls_mb_s": tls_mb_s,
        "ratio": tls_mb_s / plain_mb_s,
        "tcp_sender_cpu_ms_per_mb": 1e3 * median(plain_cpu) / megabytes,
        "tls_sender_cpu_ms_per_mb": 1e3 * median(encrypted_cpu) / megabytes,
    }


def _measure(link: str, num_pairs: int, num_turns: int) -> dict[str, float]:
    turns = [turn for _ in range(num_pairs) for turn in _turns(link, num_turns)]
    megabytes = _NUM_BLOCKS * _BLOCK_BYTES / 1e6
    return {
        "ratio": median(bare / ours for ours, bare in turns),
        "mb_s": megabytes / median(ours for ours, _ in turns),
        "ceiling_mb_s": megabytes / median(bare for _, bare in turns),
    }


def _turns(
    link: str, num_turns: int, files: Sequence[str] = (), cpu_s: list[float] | None = None
) -> list[tuple[float, float]]:
    """Seconds of the link and of its ceiling, with new memory and a new process. `cpu_s` gets
    the processor time of this process for each push."""
    with _far_end(link, _WARM_UP + num_turns, files) as told:
        near = _Near(link, told, files)
        try:
            return [near.turn(number) for number in range(_WARM_UP + num_turns)][_WARM_UP:]
        finally:
            near.close()
            if cpu_s is not None:
                cpu_s += near.cpu_s[_WARM_UP:]


class _Near:
    """The sending process: a link's sender, and a ceiling beside it."""

    def __init__(self, link: str, told: dict[str, Any], files: Sequence[str]) -> None:
        self._clock = SystemClock()
        self._blocks = Blocks(_NUM_BLOCKS, _BLOCK_BYTES, shared=link == "shm")
        rng = np.random.default_rng(1)
        for view in self._blocks.views:
            view[:] = rng.bytes(len(view))
        self._outcome: LinkEvent | None = None
        self._ended = Event()
        self.cpu_s: list[float] = []
        """Processor time of this process for each push."""
        links = Links(link_config(files), self._blocks, self._deliver)
        self._sender: Sender = links.connect(told["address"])
        self._socket = socket.create_connection(("127.0.0.1", told["port"]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ceiling = self._make_ceiling(link, told)

    def turn(self, number: int) -> tuple[float, float]:
        """Seconds of the link and of its ceiling; the order alternates."""
        if number % 2:
            bare = self._time(self._ceiling)
            return self._time(lambda: self._push(number)), bare
        ours = self._time(lambda: self._push(number))
        return ours, self._time(self._ceiling)

    def close(self) -> None:
        self._sender.close()
        self._socket.close()

    def _time(self, work: Callable[[], None]) -> float:
        began = self._clock.now()
        work()
        return self._clock.now() - began

    def _push(self, lease: int) -> None:
        pieces = tuple(BlockPiece(at, at, _BLOCK_BYTES) for at in range(_NUM_BLOCKS))
        deadline_s = self._clock.now() + _TIMEOUT_S
        cpu_s = time.process_time()
        self._ended.clear()
        self._sender.push(Push(job=lease, lease=lease, pieces=pieces, deadline_s=deadline_s))
        assert self._ended.wait(_TIMEOUT_S)
        assert isinstance(self._outcome, PushDone), f"a push failed: {self._outcome}"
        self.cpu_s.append(time.process_time() - cpu_s)

    def _deliver(self, event: LinkEvent) -> None:
        self._outcome = event
        self._ended.set()

    def _make_ceiling(self, link: str, told: dict[str, Any]) -> Callable[[], None]:
        if link == "tcp":
            return self._bare_socket
        if link == "shm":
            into = Blocks(_NUM_BLOCKS, _BLOCK_BYTES)
            return lambda: self._memcpy(into)
        engine = bare_engine(self._blocks.memory)
        return lambda: self._bare_transfers(engine, told)

    def _bare_socket(self) -> None:
        for view in self._blocks.views:
            checksum(view)
            self._socket.sendall(view)
        assert self._socket.recv(1) == DONE

    def _memcpy(self, into: Blocks) -> None:
        for view, target in zip(self._blocks.views, into.views, strict=True):
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(view, np.uint8))

    def _bare_transfers(self, engine: Any, told: dict[str, Any]) -> None:  # noqa: ANN401
        for view in self._blocks.views:
            checksum(view)
        source = address_of(self._blocks.memory)
        started = [
            engine.batch_transfer_async_write(
                told["engine"], [source + at], [told["memory"] + at], [_WRITE_BYTES]
            )
            for at in range(0, _NUM_BLOCKS * _BLOCK_BYTES, _WRITE_BYTES)
        ]
        nap = Event()
        for number in started:
            while not (status := engine.transfer_check_status(number)):
                nap.wait(2e-4)  # the engine's own waiting calls spin, and are slower
            assert status == 1, f"the Transfer Engine failed: {status}"
        self._socket.sendall(DONE)
        assert self._socket.recv(1) == DONE


@contextmanager
def _far_end(link: str, num_leases: int, files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The receiving process, and its description of itself."""
    words = [link, str(_NUM_BLOCKS), str(_BLOCK_BYTES), str(num_leases), *files]
    with subprocess.Popen(
        [sys.executable, "-m", "headwater.bench._link_far", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as far:
        assert far.stdin is not None
        assert far.stdout is not None
        try:
            first = next((line for line in far.stdout if line.startswith(MARK)), None)
            assert first is not None, f"the far end of {link} did not start"
            yield json.loads(first.removeprefix(MARK))
            far.stdin.close()
            far.wait(_TIMEOUT_S)
        finally:
            far.kill()


if __name__ == "__main__":
    _is_quick = "--quick" in sys.argv
    if "--tls" in sys.argv:
        _at = sys.argv.index("--tls")
        print(json.dumps(_measure_tls(sys.argv[_at + 1 : _at + 4], _is_quick), indent=2))
    else:
        print(json.dumps(_measure_speeds(_is_quick), indent=2))
