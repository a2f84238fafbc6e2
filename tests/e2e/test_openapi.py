"""schemathesis over the OpenAPI document of a live server: nothing undocumented, no 5xx."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from headwater.server.openapi import document
from tests.e2e.live import LiveServer
from tests.search import SCALE

pytestmark = pytest.mark.slow

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
# Pausing would make every later generation wait for ever; a pause has its own tests.
OPERATIONS = [
    (method, path)
    for path, operations in document()["paths"].items()
    for method in operations
    if path != "/v1/pause"
]


@pytest.fixture(scope="module")
def server():
    server = LiveServer("--max-model-len", "96").wait_ready()
    yield server
    try:
        assert server.get("/health").status_code == 200, server.errors
        assert server.until_idle()["tiers"]["device"]["held"] == 0
    finally:
        code = server.stop()
    assert code == 0, server.errors


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_url(server.url + "/openapi.json")


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_no_answer_is_undocumented(schema, method, path):
    """Lesson 68: whatever is sent, valid or not, the answer is one the document promises."""
    operation = schema[path][method]

    modes = [schemathesis.GenerationMode.POSITIVE]
    if "requestBody" in document()["paths"][path][method]:  # else there is nothing to get wrong
        modes.append(schemathesis.GenerationMode.NEGATIVE)
    for mode in modes:

        @settings(max_examples=15 * SCALE, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def send(case):
            case.call_and_validate(checks=CHECKS)

        send()
