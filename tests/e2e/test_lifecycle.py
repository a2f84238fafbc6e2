"""How a server starts, dies and stops: exit codes, messages, and what clients get."""

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from headwater.cli import main
from tests.e2e.live import LiveServer

pytestmark = pytest.mark.slow


def test_sigterm_drains_then_exits_0():
    """Lesson 59: running requests finish; health checks and new requests get 503 on the open
    port; the exit code is 0, and the log has the start and the end."""
    server = LiveServer("--drain-timeout", "300").wait_ready()
    stream = server.open_stream(max_tokens=2000)
    first = stream.next()

    server.process.send_signal(signal.SIGTERM)
    server.until_draining()
    refused = server.complete()
    rest = stream.rest()

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "draining"
    assert refused.headers["retry-after"] == "1"
    assert first["choices"][0]["finish_reason"] is None
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    stream.close()
    assert server.wait() == 0
    with pytest.raises(httpx.ConnectError):
        server.get("/health")
    log = "".join(server.errors)
    assert "drain begun: running=1" in log
    assert "drain ended: " in log


def test_a_second_signal_stops_at_once():
    """The server stops at once; clients get a last event."""
    server = LiveServer("--drain-timeout", "600").wait_ready()
    stream = server.open_stream(max_tokens=8000)
    stream.next()

    server.process.send_signal(signal.SIGTERM)
    server.until_draining()
    server.process.send_signal(signal.SIGTERM)

    assert stream.rest()[-1]["choices"][0]["finish_reason"] == "abort"
    stream.close()
    assert server.wait() == 0
    assert "stopping now" in "".join(server.errors)


def test_a_drain_is_bounded_and_two_servers_live_side_by_side():
    """Lesson 59: an endless request is ended with an error; and lesson 60: two servers share
    nothing, so stopping one does not affect the other."""
    other, server = LiveServer(), LiveServer("--drain-timeout", "1")
    other.wait_ready()
    server.wait_ready()
    stream = server.open_stream(max_tokens=8000)
    stream.next()

    server.process.send_signal(signal.SIGTERM)
    assert stream.rest()[-1]["choices"][0]["finish_reason"] == "abort"
    stream.close()
    assert server.wait() == 0
    assert "Traceback" not in "".join(server.errors)

    assert other.complete(max_tokens=4).status_code == 200
    assert other.url != server.url
    assert other.stop(signal.SIGINT) == 0


def check_replaced(server, reason):
    """The engine died once, for this reason, and a new one serves until the server is stopped."""
    server.until_healthy()
    assert server.complete(max_tokens=4).status_code == 200
    assert "headwater:engine_restarts_total 1.0" in server.get("/metrics").text
    assert server.stop() == 0
    log = "".join(server.errors)
    assert log.count("engine died: ") == 1
    assert reason in log
    assert "engine restarted: " in log


def test_every_client_gets_an_error_at_once_when_the_engine_is_killed_and_it_is_replaced():
    """Streams get an error event, waiting requests and /health a 503 with the reason. The port
    stays open, and a new engine serves; the log and a metric say so."""
    server = LiveServer("--max-num-seqs", "1").wait_ready()
    stream = server.open_stream(max_tokens=8000)
    stream.next()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.complete)
        server.until(lambda state: state["num_waiting"] > 0)

        os.kill(server.engine_pid, signal.SIGKILL)

        assert stream.rest()[-1]["error"]["code"] == "engine_dead"
        answer = waiting.result(timeout=10)
    stream.close()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"
    for refused in (server.get("/health"), server.complete()):
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "engine_restarting"
        assert "restarting: the engine process ended with signal 9" in refused.text
        assert int(refused.headers["retry-after"]) >= 1
    assert "headwater:engine_up 0.0" in server.get("/metrics").text
    check_replaced(server, "reason=the engine process ended with signal 9")


def test_every_client_gets_an_error_for_a_device_step_that_never_ends_and_the_engine_is_replaced(
    tmp_path,
):
    """The watchdog declares the engine dead after --step-timeout. Streams and waiting requests
    get `engine_dead` with the reason, the supervisor restarts the engine, and the next request
    is answered."""
    order = tmp_path / "hang"
    server = LiveServer(
        *("--max-num-seqs", "1", "--step-timeout", "8", "--swap-space", "0.1"),
        *("--kvcache-storage-backend", "tests.e2e.hung_device:HungDevice"),
        *("--kvcache-storage-config", json.dumps({"order": str(order)})),
    ).wait_ready()
    stream = server.open_stream(max_tokens=8000)
    stream.next()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(server.complete)
        server.until(lambda state: state["num_waiting"] > 0)

        order.touch()

        told = stream.rest()[-1]["error"]
        answer = waiting.result(timeout=60)
    stream.close()
    assert told["code"] == answer.json()["error"]["code"] == "engine_dead"
    assert "did not end within 8 s: the device hangs or is lost" in told["message"]
    check_replaced(server, "the device hangs: step=")


def test_a_server_may_be_told_to_end_with_its_engine():
    """For operators whose own supervisor restarts processes, the server prints the message and
    exits with 1."""
    server = LiveServer("--exit-with-engine").wait_ready()

    os.kill(server.engine_pid, signal.SIGKILL)

    assert server.wait() == 1
    assert any("the engine process ended with signal 9" in line for line in server.errors)


@pytest.mark.parametrize("command", ["serve", "route"])
def test_a_port_in_use_gets_a_clear_message(command):
    """Lesson 60: a port in use is reported before anything is loaded, with its number; the exit
    code is 1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        found = subprocess.run(
            [sys.executable, "-m", "headwater", command, "--port", str(port)],
            env=os.environ | {"HEADWATER_PEER_TOKEN": "t" * 32},
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert found.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in found.stderr
    assert "loading" not in found.stdout
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("host", "sentence"),
    [
        ("192.0.2.1", "cannot bind 192.0.2.1:0"),
        ("no.such.host.invalid", "cannot resolve --host"),
    ],
)
def test_an_address_of_another_machine_gets_a_clear_message(host, sentence, capsys):
    """Lesson 60: the address is reported before anything is loaded."""
    assert main(["serve", "--host", host, "--port", "0"]) == 1

    told = capsys.readouterr()
    assert sentence in told.err
    assert "loading" not in told.out


def test_a_model_that_cannot_be_served_gets_a_message(tmp_path):
    """Lesson 61: the operator gets the engine's message without a traceback, and the exit code
    is 1."""
    server = LiveServer(str(tmp_path))

    assert server.wait() == 1
    errors = "".join(server.errors)
    assert "headwater: error:" in errors
    assert "config.json" in errors
    assert "Traceback" not in errors


def test_a_server_can_be_stopped_while_it_loads():
    """A server that is stopped before its model is loaded ends at once with exit code 0."""
    server = LiveServer()
    assert server.process.stdout is not None
    assert server.process.stdout.readline().startswith("loading")

    assert server.stop() == 0


def test_the_demo_ends_by_itself():
    """`headwater demo` shows a table with what was reused, and exits 0."""
    found = subprocess.run(
        [sys.executable, "-m", "headwater", "demo"], capture_output=True, text=True, timeout=120
    )

    assert found.returncode == 0, found.stderr
    assert "what the prefix cache saved" in found.stdout
    assert "prompt tokens were found in the cache" in found.stdout
