"""`headwater top` against a live server: in a terminal, once, and as JSON."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

import pytest
from rich.console import Console

from headwater.cli.panes import screen

pytestmark = pytest.mark.slow

TOP = (sys.executable, "-m", "headwater", "top")


def run_top(*arguments):
    return subprocess.run(
        [*TOP, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"COLUMNS": "140"},
    )


TERMINAL = {"TERM": "xterm-256color", "COLUMNS": "150", "LINES": "50"}
"""The size is set too, because COLUMNS of a test runner overrides the size of the
pseudo-terminal."""


@contextlib.contextmanager
def top_in_terminal(url, *, interval):
    """`headwater top` in a pseudo-terminal of 150 columns: our end of the terminal, and the
    process. The process is killed at the end, because it would wait for a terminal that is not
    read."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 150, 0, 0))
    with subprocess.Popen(
        [*TOP, url, "--interval", interval],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | TERMINAL,
        start_new_session=True,
    ) as process:
        os.close(theirs)
        try:
            yield ours, process
        finally:
            process.kill()
    os.close(ours)


def read_until(terminal, wanted, *, shown=""):
    """What the terminal showed until all of `wanted` appeared; pytest's own timeout limits the
    wait."""
    while not all(word in shown for word in wanted):
        shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


def drain(terminal):
    """Read until the other end is closed, which a terminal reports as an error."""
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass


def test_once_prints_the_numbers_of_cache(server):
    """The view is printed once in plain text, for people and scripts without a terminal."""
    server.complete(prompt="top shows this " * 40, max_tokens=8)
    state = server.until_idle()

    result = run_top(server.url, "--once", "--interval", "0.2")

    assert result.returncode == 0, result.stderr
    device = state["tiers"]["device"]
    row = next(line for line in result.stdout.splitlines() if re.match(r"│ +device ", line))
    numbers = [int(n.replace(",", "")) for n in re.findall(r"(?<= )[\d,]+(?= )", row)]
    assert numbers[:4] == [device[key] for key in ("held", "cached", "evictable", "free")]
    assert "\x1b" not in result.stdout
    assert "ended lately" in result.stdout


@pytest.mark.parametrize(
    ("breakers", "words"),
    [
        ({"breaker": "closed", "write_breaker": "closed"}, "│  storage  file  "),
        ({"breaker": "closed", "write_breaker": "open"}, "file writes stopped"),
        ({"breaker": "half_open", "write_breaker": "open"}, "file reads, writes stopped"),
    ],
)
def test_storage_that_an_open_breaker_has_stopped_is_named(server, breakers, words):
    """A full disk is seen in the terminal as on the dashboard."""
    now = server.get("/stats").json()
    now["cache"]["storage"] = {"backend": "file", "num_blocks": 7} | breakers
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(screen(now, [], server.url, "live"))

    assert words in console.export_text()


def test_json_prints_what_stats_says(server):
    """With --json the command prints one line of JSON, for programs."""
    result = run_top(server.url, "--once", "--json")

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["model"] == server.get("/stats").json()["model"]


def test_a_server_that_is_not_running_gets_a_message():
    """There is no traceback, and the exit code is 1."""
    result = run_top("http://127.0.0.1:9", "--once")

    assert result.returncode == 1
    assert result.stderr.startswith("headwater: error: http://127.0.0.1:9 does not answer")


@pytest.mark.parametrize("arguments", [("ftp://x",), ("--interval", "0")])
def test_top_refuses_an_invalid_url_or_interval(arguments):
    """For a wrong URL or interval, the message names the valid values."""
    result = run_top(*arguments)

    assert result.returncode == 1
    assert "Traceback" not in result.stderr


def test_live_in_a_terminal_it_updates_until_interrupted(server):
    """In a pseudo-terminal the command draws, shows a new request, and ends on Ctrl-C."""
    with top_in_terminal(server.url, interval="0.2") as (ours, process):
        read_until(ours, ["headwater-tiny", "live", "tiers", "running and waiting"])
        server.complete(prompt="a request to be seen", max_tokens=4, request_id="seen-in-top")
        shown = read_until(ours, ["seen-in-top"])
        process.send_signal(signal.SIGINT)
        drain(ours)
        assert process.wait(timeout=20) == 130
    assert "Traceback" not in shown


def test_the_key_q_ends_top(server):
    """Afterwards the terminal is as before, and the exit code is 0."""
    with top_in_terminal(server.url, interval="30") as (ours, process):
        read_until(ours, ["running and waiting"])
        os.write(ours, b"q")
        drain(ours)
        assert process.wait(timeout=20) == 0


def test_ids_shorten_in_a_narrow_terminal(server):
    """Below 100 columns an id keeps its beginning and its end, and the other columns stay."""
    name = "a-rather-long-request-id-of-a-client-0123"
    server.complete(prompt="narrow", max_tokens=2, request_id=name)
    command = [*TOP, server.url, "--once", "--interval", "0.1"]

    shown = {
        columns: subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env=os.environ | {"COLUMNS": columns},
        ).stdout
        for columns in ("90", "160")
    }

    assert name in shown["160"]
    assert name not in shown["90"]
    assert "a-rathe…" in shown["90"]
    row = next(line for line in shown["90"].splitlines() if "a-rathe" in line)
    assert "length" in row
