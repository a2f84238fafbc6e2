"""The record of a request for programs: JSON logs, and spans at a real receiver."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.e2e.live import LiveServer

pytestmark = pytest.mark.slow

PROMPT = "The ledger says where each token came from. " * 10
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Receiver:
    """An OTLP/HTTP receiver that decodes with OpenTelemetry's own messages."""

    def __init__(self):
        messages = pytest.importorskip(
            "opentelemetry.proto.collector.trace.v1.trace_service_pb2"
        )
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.paths.add(self.path)
                export = messages.ExportTraceServiceRequest.FromString(body)
                for resource in export.resource_spans:
                    for scope in resource.scope_spans:
                        receiver.spans.extend(scope.spans)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(messages.ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *arguments):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever)
        self._thread.start()

    def close(self):
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def value_of(attribute):
    value = attribute.value
    return getattr(value, value.WhichOneof("value"))


@pytest.fixture(scope="module")
def told():
    """Logs and spans of a cold request, a warm one and one whose client disconnected."""
    receiver = Receiver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        server = LiveServer("--log-format", "json").wait_ready()
    parent = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "temperature": 0}
    server.post("/v1/completions", body | {"request_id": "cold"})
    server.post("/v1/completions", body | {"request_id": "warm"}, headers=parent)
    leaving = server.open_stream(max_tokens=2000, request_id="left")
    leaving.next()
    leaving.close()
    server.until_idle()
    assert server.stop() == 0, server.errors
    receiver.close()
    return server, receiver


def records(server):
    lines = [json.loads(line) for line in server.errors]
    return {
        line["request_id"].partition("-")[0]: line for line in lines if "request_id" in line
    }


def test_every_line_of_the_log_is_json_and_each_request_has_one(told):
    """A line has tokens by source, the first reason, waits, bytes and the end; no prompt and no
    output."""
    server, _ = told
    found = records(server)

    assert set(found) == {"cold", "warm", "left"}
    cold, warm = found["cold"], found["warm"]
    assert cold["message"] == "request ended"
    assert (cold["miss_reason"], cold["cached_tokens"]) == ("never_seen", 0)
    assert warm["tokens_by_source"]["device"] == warm["cached_tokens"] > 0
    assert sum(warm["tokens_by_source"].values()) == warm["prompt_tokens"]
    assert warm["output_tokens"] == 6
    assert warm["queued_s"] <= warm["first_token_s"] <= warm["duration_s"]
    assert warm["loaded_bytes"] == 0
    assert found["left"]["finish_reason"] == "abort"
    assert "ledger says" not in "".join(server.errors)


def test_spans_arrive_with_their_ledger_below_their_caller(told):
    """The receiver decodes OTLP over HTTP: there is one span per request, with its phases as
    children and the caller as parent."""
    server, receiver = told
    requests = {
        next(value_of(a) for a in span.attributes if a.key == "headwater.request_id"): span
        for span in receiver.spans
        if span.name == "llm_request"
    }
    by_name = {name.partition("-")[0]: span for name, span in requests.items()}

    assert receiver.paths == {"/v1/traces"}
    assert set(by_name) == {"cold", "warm", "left"}
    warm = by_name["warm"]
    assert warm.trace_id.hex() == TRACE
    assert warm.parent_span_id.hex() == CALLER
    assert not by_name["cold"].parent_span_id
    attributes = {a.key: value_of(a) for a in warm.attributes}
    logged = records(server)["warm"]
    assert attributes["headwater.cached_tokens"] == logged["cached_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == 6
    inside = [s for s in receiver.spans if s.parent_span_id == warm.span_id]
    assert [span.name for span in inside] == ["queue", "prefill", "decode"]
    assert all(
        warm.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        for span in inside
    )
    assert inside[-1].end_time_unix_nano <= warm.end_time_unix_nano + 1000
