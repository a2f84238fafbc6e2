"""One live server for all tests that leave its state unchanged."""

import pytest

from tests.e2e.live import LiveServer


@pytest.fixture(scope="session")
def server():
    server = LiveServer("--max-model-len", "4096").wait_ready()
    yield server
    assert server.stop() == 0, server.errors
