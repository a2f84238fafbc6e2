"""The only module that knows OpenTelemetry: turns request records into spans.

A sequence is a span from its arrival to its end, with child spans for waiting, prefill and
decoding. Spans are made when the sequence has ended, so a running sequence has no state here. A
thread of the exporter sends them: no request waits for a collector.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from headwater.config import VERSION
from headwater.errors import ConfigError
from headwater.metrics.ledger import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.context import Context

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


def open_spans(environ: Mapping[str, str], *, model: str) -> "SpanExporter | None":
    """The exporter, if the environment names an endpoint; otherwise None."""
    if not environ.get(ENDPOINT):
        return None
    try:
        return SpanExporter(model)
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"{ENDPOINT} is set, and the package {exc.name!r} is not installed; "
            "try: pip install 'headwater[otel]', or unset it"
        ) from exc


class SpanExporter:
    """Sends spans over OTLP/HTTP, configured by OpenTelemetry's own environment variables."""

    def __init__(self, model: str) -> None:
        # Imported here: it is an extra, and slow to import.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": "headwater", "service.version": VERSION})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("headwater", VERSION)
        self._model = model

    def record(self, record: RequestRecord) -> None:
        """Send the spans of a sequence that ended."""
        from opentelemetry.trace import set_span_in_context

        start_s = record.start_unix_s
        whole = self._tracer.start_span(
            "llm_request",
            context=_caller(record.traceparent),
            start_time=_ns(start_s),
            attributes=_attributes(record, self._model),
        )
        inside = set_span_in_context(whole)
        for name, begin_s, end_s in _phases(record):
            part = self._tracer.start_span(
                name, context=inside, start_time=_ns(start_s + begin_s)
            )
            part.end(_ns(start_s + end_s))
        whole.end(_ns(start_s + record.duration_s))

    def close(self) -> None:
        """Send the remaining spans; bounded by the exporter's timeout."""
        self._provider.shutdown()


def _phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """The phases of a sequence in order: name, begin, end, in seconds after its arrival."""
    if record.queued_s is None:
        return [("queue", 0.0, record.duration_s)]
    first_s = record.duration_s if record.first_token_s is None else record.first_token_s
    queued_s = min(record.queued_s, first_s)
    phases = [("queue", 0.0, queued_s), ("prefill", queued_s, first_s)]
    if record.first_token_s is not None:
        phases.append(("decode", first_s, record.duration_s))
    if record.load is not None and record.load.waited_s > 0:
        phases.append(("load", max(queued_s - record.load.waited_s, 0.0), queued_s))
    return phases


def _attributes(record: RequestRecord, model: str) -> dict[str, str | int | float]:
    """Attributes of a span. Their names are those of OpenTelemetry's conventions if they exist,
    otherwise our own."""
    found: dict[str, str | int | float | None] = {
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.output_tokens,
        "gen_ai.response.finish_reasons": record.finish_reason,
        "headwater.request_id": record.request_id,
        "headwater.cached_tokens": record.cached_tokens,
        "headwater.miss_reason": record.miss_reason,
        "headwater.loaded_bytes": record.loaded_bytes,
        "headwater.time_to_first_token_s": record.first_token_s,
        "headwater.inter_token_s": record.inter_token_s,
    }
    for source, num_tokens in record.tokens_by_source.items():
        found[f"headwater.tokens.{source}"] = num_tokens
    if record.load is not None:
        found["headwater.load.choice"] = record.load.choice
        found["headwater.load.num_blocks"] = record.load.num_blocks
        found["headwater.load.waited_s"] = record.load.waited_s
    return {name: value for name, value in found.items() if value is not None}


def _caller(traceparent: str | None) -> "Context | None":
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if traceparent is None:
        return None
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})


def _ns(unix_s: float) -> int:
    return round(unix_s * 1e9)
