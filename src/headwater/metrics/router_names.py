"""Every metric of a router once; `names` has those of a server."""

from headwater.metrics.names import Kind, Metric

ROUTER_REQUESTS = Metric(
    "router_requests_total", Kind.COUNTER, "Requests that ended, by how.", ("outcome",)
)
ROUTER_ROUTED = Metric(
    "router_routed_total",
    Kind.COUNTER,
    "Requests answered, by instance and by how far its cache was known.",
    ("instance", "trust"),
)
ROUTER_FAILURES = Metric(
    "router_failures_total",
    Kind.COUNTER,
    "Attempts that gave the client nothing, or not all.",
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
    "Prompt tokens that the chosen instance had said it has, by group.",
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
    "How far the cache of an instance is known: exact, degraded, fallback.",
    ("instance", "trust"),
)
ROUTER_VIEW_BLOCKS = Metric(
    "router_view_blocks", Kind.GAUGE, "Blocks an instance said it has.", ("instance",)
)
ROUTER_IN_FLIGHT = Metric(
    "router_requests_in_flight", Kind.GAUGE, "Requests at an instance.", ("instance",)
)
ROUTER_GAPS = Metric(
    "router_event_gaps_total", Kind.COUNTER, "KV events missed and asked for.", ("instance",)
)

ROUTER_COUNTERS = (
    ROUTER_REQUESTS,
    ROUTER_ROUTED,
    ROUTER_FAILURES,
    ROUTER_PROMPT_TOKENS,
    ROUTER_CACHED_TOKENS,
    ROUTER_PREFILLS,
)
"""Counted by the router; its other metrics are how things stand."""

ROUTER_METRICS = (
    *ROUTER_COUNTERS,
    ROUTER_INSTANCES,
    ROUTER_TRUST,
    ROUTER_VIEW_BLOCKS,
    ROUTER_IN_FLIGHT,
    ROUTER_GAPS,
)
"""Everything a router exposes."""
