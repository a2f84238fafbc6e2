"""`headwater top` on a router: instances with rates, and those that cannot be reached."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from headwater.cli import main

INSTANCE = {
    "instance_id": "10.0.0.1:8000",
    "role": "mixed",
    "url": "http://127.0.0.1:9",
    "state": "lost",
    "num_alive": 3,
    "known_blocks": 1200,
    "seen_s_ago": 0.4,
    "load": {"running": 2, "waiting": 1},
}


class RouterAnswers(BaseHTTPRequestHandler):
    """Answers as a router does: instances, and no /stats."""

    def do_GET(self):
        found = self.path == "/instances"
        body = json.dumps({"policy": "cache_aware", "instances": [INSTANCE]} if found else {})
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        """Say nothing."""


@contextmanager
def router():
    with ThreadingHTTPServer(("127.0.0.1", 0), RouterAnswers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_router_is_shown_by_its_instances(capsys, monkeypatch):
    """State, load and known blocks; rates are absent where an instance cannot be reached."""
    monkeypatch.setenv("COLUMNS", "150")
    with router() as url:
        assert main(["top", url, "--once", "--interval", "0.1"]) == 0

    shown = capsys.readouterr().out
    assert "policy cache_aware, 0 of 1 instances ready" in shown
    row = next(line for line in shown.splitlines() if "10.0.0.1:8000" in line)
    assert row.split() == [
        *(
            "10.0.0.1:8000",
            "mixed",
            "lost",
            "2",
            "1",
            "-",
            "-",
            "-",
            "1,200",
            "400",
            "ms",
            "ago",
        )
    ]


def test_json_of_a_router_is_its_instances(capsys):
    """For programs: the router's own answer."""
    with router() as url:
        assert main(["top", url, "--once", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["instances"] == [INSTANCE]
