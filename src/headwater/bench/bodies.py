"""`headwater bench bodies`: how long one large body delays other requests.

A cluster of a router and one instance runs as processes. A client sends one body of about 15 MB
while another client sends `GET /health` every 2 ms. Each figure is the time of the longest of
these answers while the body is processed, as the median over several tries. `wall_ms` is the
whole time; `loop_ms` excludes the time in which the event loop's thread waited for a processor.
On an idle machine both are the same; on a busy one `loop_ms` is what the server itself adds.
`idle` is measured without a body.
"""

import http.client
import json
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from headwater.bench._flags import read_flags
from headwater.bench._live_cluster import (
    LiveProcess,
    live_cluster,
    processes_of,
    socket_inodes,
)
from headwater.bench._report import print_report
from headwater.errors import EngineDead

_BODY_BYTES = 15_000_000
_INTERVAL_S = 0.002
_AFTER_S = 0.3
_IDLE_S = 1.0
_FLAGS = ("--mixed", "1", "--", "--threads", "1", "--num-gpu-blocks-override", "600")


Shape = tuple[str, dict[str, Any]]
"""Path and body of a request; an empty path sends none."""


def _chat(messages: Any, **fields: Any) -> Shape:  # noqa: ANN401 -- JSON
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 1, **fields}


def _long_text() -> Shape:
    return "/v1/completions", {"prompt": "a word, " * (_BODY_BYTES // 8), "max_tokens": 1}


def _token_ids() -> Shape:
    return "/v1/completions", {"prompt": [65] * (_BODY_BYTES // 4), "max_tokens": 1}


def _many_messages() -> Shape:
    one = {"role": "user", "content": "hello " * 30}
    return _chat([one] * (_BODY_BYTES // 225))


def _tiny_messages() -> Shape:
    return _chat([{"role": "user", "content": "a"}] * (_BODY_BYTES // 34))


def _fitting_messages() -> Shape:
    """Messages with as many values as are accepted, so that nothing is refused early."""
    return _chat([{"role": "user", "content": "a" * 300}] * 16_000)


def _tools(num_tools: int) -> list[dict[str, Any]]:
    fields = {f"field_{n}": {"type": "string", "description": "x" * 280} for n in range(80)}
    tool = {"name": "", "parameters": {"type": "object", "properties": fields}}
    return [
        {"type": "function", "function": tool | {"name": f"f{n}"}} for n in range(num_tools)
    ]


def _many_tools() -> Shape:
    return _chat([{"role": "user", "content": "call one"}], tools=_tools(500))


def _fitting_tools() -> Shape:
    """Tools with as many bytes as are accepted, written in as many calls of the JSON writer as
    possible."""
    return _chat([{"role": "user", "content": "call one"}], tools=_tools(75))


def _arguments() -> Shape:
    """JSON inside a text, with as many values as are accepted."""
    call = {"function": {"name": "f", "arguments": "[" + "{}," * 90_000 + "1]"}}
    last = {"role": "user", "content": "a" * (_BODY_BYTES - 400_000)}
    return _chat([{"role": "assistant", "content": "", "tool_calls": [call]}, last])


def _blocks() -> Shape:
    """A message with as many blocks as are accepted; they are joined into one text."""
    blocks = [{"type": "text", "text": "a" * 700}] * 17_000
    return "/v1/messages", {"messages": [{"role": "user", "content": blocks}], "max_tokens": 1}


def _grammar() -> Shape:
    return "/v1/completions", {"prompt": "a", "guided_regex": "/" * (2 << 20), "max_tokens": 1}


def _deep_lists() -> Shape:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    return _chat(
        [{"role": "user", "content": "x"}], chat_template_kwargs={"deep": [deep] * 14_000}
    )


def _responses() -> Shape:
    turns = [{"role": "user", "content": "hello " * 30}] * (_BODY_BYTES // 225)
    return "/v1/responses", {"input": turns, "max_output_tokens": 1}


SHAPES: dict[str, Callable[[], Shape]] = {
    "idle": lambda: ("", {}),
    "one long text": _long_text,
    "token ids": _token_ids,
    "messages of 180 characters": _many_messages,
    "messages of 1 character": _tiny_messages,
    "16,000 messages": _fitting_messages,
    "500 tools": _many_tools,
    "75 tools": _fitting_tools,
    "arguments of a call": _arguments,
    "messages API, 17,000 blocks": _blocks,
    "a pattern of 2 MB": _grammar,
    "nested lists": _deep_lists,
    "responses API": _responses,
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print a table, or JSON."""
    parser = ArgumentParser(prog="headwater bench bodies", description=__doc__)
    parser.add_argument(
        "--tries", type=int, default=5, metavar="N", help="bodies per shape (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = read_flags(parser, argv)
    with live_cluster(_FLAGS) as cluster:
        targets = {"instance": cluster.children["mixed-1"], "router": cluster.router}
        result = {
            name: {
                shape: _measured(target, make(), options.tries)
                for shape, make in SHAPES.items()
            }
            for name, target in targets.items()
        }
    print_report("headwater bench bodies", result, as_json=options.json)
    return 0


def _measured(target: LiveProcess, shape: Shape, num_tries: int) -> dict[str, Any]:
    """The longest delay in milliseconds, the median of the tries."""
    path, body = shape[0], json.dumps(shape[1]).encode() if shape[0] else b""
    wall_ms, loop_ms, statuses = [], [], set()
    for _ in range(num_tries):
        with _HealthProbe(target) as probe:
            if body:
                statuses.add(_send(target, path, body))
            threading.Event().wait(_AFTER_S if body else _IDLE_S)
        wall_ms.append(max(probe.delays_s) * 1e3)
        loop_ms.append(max(probe.loop_delays_s) * 1e3)
    shown = {"wall_ms": median(wall_ms), "loop_ms": median(loop_ms)}
    return shown | ({"status": ",".join(map(str, sorted(statuses)))} if body else {})


def _send(target: LiveProcess, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=60)
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


class _HealthProbe:
    """Asks for the health of a server until the end of its `with` statement."""

    def __init__(self, target: LiveProcess) -> None:
        self.delays_s: list[float] = []
        self.loop_delays_s: list[float] = []
        self._target = target
        self._connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=60)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_HealthProbe":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        self._ask()
        schedule = self._schedule_file()
        while not self._stop.is_set():
            waited_s, begin_s = _waited_s(schedule), time.perf_counter()
            self._ask()
            delay_s = time.perf_counter() - begin_s
            self.delays_s.append(delay_s)
            self.loop_delays_s.append(delay_s - (_waited_s(schedule) - waited_s))
            self._stop.wait(_INTERVAL_S)

    def _ask(self) -> None:
        self._connection.request("GET", "/health")
        self._connection.getresponse().read()

    def _schedule_file(self) -> Path:
        """Scheduling statistics of the thread that serves this connection, which is the main
        thread of the process at its other end."""
        near = self._connection.sock.getsockname()[1]
        ends = (f":{self._target.port:04X}", f":{near:04X}")
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            local, remote, *_, inode = line.split()[1:10]
            if (local[8:], remote[8:]) == ends:
                for pid in processes_of(self._target.pid):
                    if inode in socket_inodes(pid):
                        return Path(f"/proc/{pid}/task/{pid}/schedstat")
        raise EngineDead(f"no process of {self._target.name} has the connection")


def _waited_s(schedule: Path) -> float:
    """Seconds that a thread was ready and had no processor."""
    return int(schedule.read_text().split()[1]) / 1e9
