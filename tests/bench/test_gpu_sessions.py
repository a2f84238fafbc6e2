"""What the benchmark of sessions reads from a server."""

from typing import Any

from headwater.bench._gpu_sessions import _computed


class MeasuredServer:
    """A server with these counters."""

    def counters(self) -> dict[str, float]:
        return {
            'headwater:prompt_tokens_computed_total{model_name="bench",reason="evicted_host"}': 64,
            'headwater:prompt_tokens_computed_total{model_name="bench",reason="timeout"}': 0,
            "headwater:engine_compilations_total": 3,
        }


def test_computed_tokens_are_counted_by_reason() -> None:
    """Reasons without tokens and other counters are left out."""
    server: Any = MeasuredServer()

    assert _computed(server) == {"evicted_host": 64}
