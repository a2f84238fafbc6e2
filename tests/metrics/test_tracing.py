"""Spans only if they are configured, and an error message if they cannot be made."""

import sys

import pytest

from headwater.errors import ConfigError
from headwater.metrics.tracing import ENDPOINT, open_spans


def test_without_an_endpoint_there_are_no_spans():
    """Nothing is imported, nothing is sent."""
    assert open_spans({}, model="m") is None


def test_an_endpoint_without_the_extra_gets_a_message(monkeypatch):
    """A configured endpoint without the packages is reported at start, not ignored."""
    monkeypatch.setitem(
        sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None
    )

    with pytest.raises(ConfigError, match=r"headwater\[otel\]"):
        open_spans({ENDPOINT: "http://127.0.0.1:1"}, model="m")
