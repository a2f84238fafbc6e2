"""`headwater top` on a router: instances with the rates that they report, and lost ones."""

import json
import ssl
import threading
from contextlib import contextmanager
from http.client import RemoteDisconnected
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.error import URLError

import pytest

from headwater.cli import main

INSTANCE = {
    "instance_id": "10.0.0.1:8000",
    "role": "mixed",
    "url": "http://127.0.0.1:9",
    "state": "ready",
    "num_alive": 3,
    "known_blocks": 1200,
    "seen_s_ago": 0.4,
    "load": {"running": 2, "waiting": 1},
    "report": {
        "output_tokens_s": 12.5,
        "prompt_tokens_s": 100.0,
        "hit_share": 0.75,
        "ttft_p50_s": 0.2,
        "ttft_p99_s": 1.5,
        "itl_p50_s": 0.01,
        "itl_p99_s": 0.05,
    },
}
LOST = {"instance_id": "10.0.0.2:8000", "role": "decode", "url": "", "seen_s_ago": 30.0}
ANSWER = {"policy": "cache_aware", "instances": [INSTANCE], "lost": [LOST]}


class RouterAnswers(BaseHTTPRequestHandler):
    """Answers like a router: instances, and no /stats."""

    def do_GET(self):
        found = self.path == "/instances"
        body = json.dumps(ANSWER if found else {})
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        """Print nothing."""


@contextmanager
def router(context=None):
    """The URL of a server that answers as a router; with TLS when it has a context."""
    with ThreadingHTTPServer(("127.0.0.1", 0), RouterAnswers) as server:
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http{'' if context is None else 's'}://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def run_top(url, capsys, *flags):
    assert main(["top", url, "--once", *flags]) == 0
    return capsys.readouterr().out


def test_a_router_is_shown_by_its_instances(capsys, monkeypatch):
    """The view has state, load and the figures of the last minute of each instance, and lost
    instances."""
    monkeypatch.setenv("COLUMNS", "150")
    with router() as url:
        shown = run_top(url, capsys)

    assert "1 of 2 instances ready, policy cache_aware" in shown
    assert "last minute: 12.5 tokens/s, 100.0 prompt tokens/s, 75 % found; 3 in flight" in shown
    row, lost = (
        next(line for line in shown.splitlines() if name in line)
        for name in ("10.0.0.1:8000", "10.0.0.2:8000")
    )
    latencies = "200 ms 1.5 s 10 ms 50 ms"
    assert " ".join(row.split()) == (
        f"10.0.0.1:8000 mixed ready 2 1 12.5 75 % {latencies} 1,200 400 ms"
    )
    assert lost.split()[:3] == ["10.0.0.2:8000", "decode", "lost"]
    assert lost.endswith("30.0 s ")


def test_a_narrow_terminal_shows_names_whole(capsys, monkeypatch):
    """In 80 columns there are fewer figures, and no name or figure is cut."""
    monkeypatch.setenv("COLUMNS", "80")
    with router() as url:
        shown = run_top(url, capsys)

    row = next(line for line in shown.splitlines() if "10.0.0.1:8000" in line)
    assert " ".join(row.split()) == "10.0.0.1:8000 mixed ready 2 1 12.5 75 % 1.5 s 400 ms"
    assert "…" not in shown
    head, ready, totals, *_ = shown.splitlines()
    assert head.startswith("headwater router at http://")
    assert head.strip().endswith("live")
    assert ready.strip() == "1 of 2 instances ready, policy cache_aware"
    assert totals.startswith("last minute: ")


def test_the_last_report_of_a_lost_instance_is_not_shown(capsys, monkeypatch):
    """An instance that is lost but still registered computes nothing now."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setitem(ANSWER, "instances", [INSTANCE | {"state": "lost"}])
    with router() as url:
        shown = run_top(url, capsys)

    row = next(line for line in shown.splitlines() if "10.0.0.1:8000" in line)
    assert " ".join(row.split()) == "10.0.0.1:8000 mixed lost - - - - - 400 ms"
    assert "last minute: 0.0 tokens/s, 0.0 prompt tokens/s, - found" in shown


def test_a_server_with_its_own_ca_is_watched(capsys, monkeypatch, tmp_path):
    """Watching such a server needs --ssl-ca-certs; without it the error names the flag."""
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.chdir(tmp_path)
    assert main(["certs", "certs", "router"]) == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("certs/router.pem", "certs/router-key.pem")
    with router(context) as url:
        shown = run_top(url, capsys, "--ssl-ca-certs", "certs/ca.pem")
        assert main(["top", url, "--once"]) == 1

    assert "1 of 2 instances ready" in shown
    assert "see --ssl-ca-certs" in capsys.readouterr().err
    assert main(["top", url, "--once", "--ssl-ca-certs", "absent.pem"]) == 1
    assert "absent.pem cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            URLError(ConnectionRefusedError(111, "Connection refused")),
            "answer: Connection refused",
        ),
        (RemoteDisconnected("closed"), "closed; write https:// if the server uses TLS"),
        (URLError("CERTIFICATE_VERIFY_FAILED"), "see --ssl-ca-certs"),
    ],
)
def test_a_server_that_does_not_answer_is_one_sentence(fault, sentence, capsys, monkeypatch):
    """The sentence does not show `<urlopen error …>` of Python, and says what may help."""

    def fail(*_, **__):
        raise fault

    monkeypatch.setattr("headwater.cli.top.urlopen", fail)
    assert main(["top", "http://127.0.0.1:9", "--once"]) == 1

    message = capsys.readouterr().err
    assert sentence in message
    assert "urlopen" not in message


def test_json_of_a_router_is_its_instances(capsys):
    """Programs get the router's own answer."""
    with router() as url:
        assert main(["top", url, "--once", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["instances"] == [INSTANCE]
