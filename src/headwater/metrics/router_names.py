"""All metrics of a router, each defined once; `names` has those of a server."""

from headwater.metrics.names import Kind, Metric

ROUTER_REQUESTS = Metric(
    "router_requests_total", Kind.COUNTER, "Requests that ended, by outcome.", ("outcome",)
)
ROUTER_ROUTED = Metric(
    "router_routed_total",
    Kind.COUNTER,
    "Requests answered, by instance and by trust in the knowledge of its cache.",
    ("instance", "trust"),
)
ROUTER_FAILURES = Metric(
    "router_failures_total",
    Kind.COUNTER,
    "Attempts that gave the client no answer, or only a part of one.",
    ("instance", "reason"),
)
ROUTER_PROMPT_TOKENS = Metric(
    "router_prompt_tokens_total",
    Kind.COUNTER,
    "Prompt tokens of answered requests, by group of instances with the same model.",
    ("group",),
)
ROUTER_CACHED_TOKENS = Metric(
    "router_cached_tokens_total",
    Kind.COUNTER,
    "Prompt tokens that the chosen instance had reported as cached, by group.",
    ("group",),
)
ROUTER_PREFILLS = Metric(
    "router_prefills_total",
    Kind.COUNTER,
    "Requests answered by a decode instance that was told to get its KV from a prefill instance.",
    ("prefill", "decode"),
)
ROUTER_INSTANCES = Metric(
    "router_instances", Kind.GAUGE, "Registered instances.", ("instance", "role", "state")
)
ROUTER_TRUST = Metric(
    "router_trust",
    Kind.GAUGE,
    "Trust in the knowledge of an instance's cache: exact, degraded, fallback.",
    ("instance", "trust"),
)
ROUTER_VIEW_BLOCKS = Metric(
    "router_view_blocks",
    Kind.GAUGE,
    "Blocks that an instance reported as cached.",
    ("instance",),
)
ROUTER_IN_FLIGHT = Metric(
    "router_requests_in_flight", Kind.GAUGE, "Requests at an instance.", ("instance",)
)
ROUTER_GAPS = Metric(
    "router_event_gaps_total",
    Kind.COUNTER,
    "Gaps in the KV events of an instance; the missing events were requested again.",
    ("instance",),
)

ROUTER_COUNTERS = (
    ROUTER_REQUESTS,
    ROUTER_ROUTED,
    ROUTER_FAILURES,
    ROUTER_PROMPT_TOKENS,
    ROUTER_CACHED_TOKENS,
    ROUTER_PREFILLS,
)
"""Counted by the router; its other metrics are current values."""

ROUTER_METRICS = (
    *ROUTER_COUNTERS,
    ROUTER_INSTANCES,
    ROUTER_TRUST,
    ROUTER_VIEW_BLOCKS,
    ROUTER_IN_FLIGHT,
    ROUTER_GAPS,
)
"""All metrics of a router."""
