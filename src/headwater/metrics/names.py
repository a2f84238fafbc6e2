"""All metrics, each defined once: name, kind, labels and meaning.

Counters only increase; compute ratios in queries. Names follow those of other engines, so that
existing dashboards need only another prefix.
"""

from dataclasses import dataclass
from enum import Enum

PREFIX = "headwater"

LAST_BLOCK = "last_block"
"""Reason of computed tokens when every block that can be found was found: the rest of the
prompt is less than a block, or must be computed to get the first token."""


class Kind(Enum):
    """Kinds of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric. Each exists once and is compared by identity."""

    name: str
    """The name without the prefix; that of a counter ends in `_total`."""

    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_FAST = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
)
_SLOW = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

ENGINE_UP = Metric("engine_up", Kind.GAUGE, "1 while the engine answers, 0 when it does not.")
VIOLATIONS = Metric(
    "invariant_violations_total",
    Kind.COUNTER,
    "Violated invariants, such as a slot freed twice; each ends the engine.",
)
ENGINE_RESTARTS = Metric(
    "engine_restarts_total",
    Kind.COUNTER,
    "Engines started because the one before died; the log has each reason.",
)
RUNNING = Metric("num_requests_running", Kind.GAUGE, "Sequences being computed.")
WAITING = Metric("num_requests_waiting", Kind.GAUGE, "Sequences waiting to be admitted.")
KV_USAGE = Metric(
    "kv_cache_usage_perc", Kind.GAUGE, "Share of device blocks held by sequences; 1 is all."
)
PREEMPTIONS = Metric("num_preemptions_total", Kind.COUNTER, "Sequences preempted.")
STEPS = Metric("engine_steps_total", Kind.COUNTER, "Steps computed.")
IDLE_TURNS = Metric(
    "engine_idle_turns_total",
    Kind.COUNTER,
    "Turns of the loop without progress, each after a deadline. Thousands per second are a "
    "defect.",
)
COMPILATIONS = Metric(
    "engine_compilations_total",
    Kind.COUNTER,
    "GPU kernels compiled or loaded after the engine was ready; each delayed requests.",
)
STEP_SECONDS = Metric("engine_step_seconds_total", Kind.COUNTER, "Seconds spent in steps.")
DECIDE_SECONDS = Metric(
    "engine_decide_seconds_total",
    Kind.COUNTER,
    "Seconds of the steps spent in scheduler and cache.",
)
QUERIES = Metric(
    "prefix_cache_queries_total", Kind.COUNTER, "Prompt tokens looked up in the prefix cache."
)
HITS = Metric(
    "prefix_cache_hits_total", Kind.COUNTER, "Prompt tokens found in the prefix cache."
)
MISSES = Metric(
    "prefix_cache_misses_total",
    Kind.COUNTER,
    "Requests whose match ended early, by the first reason.",
    ("reason",),
)
TIER_BLOCKS = Metric("tier_blocks", Kind.GAUGE, "Blocks of a tier by state.", ("tier", "state"))
TIER_EVICTED = Metric(
    "tier_evicted_blocks_total", Kind.COUNTER, "Blocks evicted from a tier.", ("tier",)
)
DUPLICATES = Metric(
    "tier_duplicate_blocks", Kind.GAUGE, "Blocks that are on the device and on the host."
)
UNWRITTEN = Metric(
    "tier_unwritten_blocks", Kind.GAUGE, "Cached device blocks that the host does not have."
)
LOST_BLOCKS = Metric(
    "tier_lost_blocks_total",
    Kind.COUNTER,
    "Blocks that left their last tier: from memory without being in storage, or from storage.",
    ("tier",),
)
EXPECTED_SECONDS = Metric(
    "pricing_expected_seconds_total",
    Kind.COUNTER,
    "Expected seconds of loads and of computing prompts.",
    ("kind",),
)
ACTUAL_SECONDS = Metric(
    "pricing_actual_seconds_total",
    Kind.COUNTER,
    "Actual seconds of the same loads and prompts.",
    ("kind",),
)
ERROR_SECONDS = Metric(
    "pricing_error_seconds_total",
    Kind.COUNTER,
    "Absolute differences between expected and actual seconds; divide by the actual seconds for the mean error.",
    ("kind",),
)
TRANSFER_BYTES = Metric(
    "transfer_bytes_total", Kind.COUNTER, "Bytes moved between two tiers.", ("link",)
)
TRANSFER_SECONDS = Metric(
    "transfer_seconds_total",
    Kind.COUNTER,
    "Seconds of work for transfers and lookups, over all threads.",
    ("link",),
)
TRANSFER_JOBS = Metric(
    "transfer_jobs_total", Kind.COUNTER, "Transfers and lookups that ended.", ("link",)
)
TRANSFER_FAILURES = Metric(
    "transfer_failures_total",
    Kind.COUNTER,
    "Transfers and lookups that failed.",
    ("link", "reason"),
)
TRANSFER_CEILING = Metric(
    "transfer_ceiling_bytes_per_second",
    Kind.GAUGE,
    "Speed of the fastest transfer of a link so far.",
    ("link",),
)
TRANSFER_QUEUE = Metric(
    "transfer_jobs_in_flight",
    Kind.GAUGE,
    "Transfers and lookups in flight.",
    ("link",),
)
LOAD_CHOICES = Metric(
    "load_choices_total",
    Kind.COUNTER,
    "Requests with blocks in lower tiers: loaded, split or computed, by reason.",
    ("reason",),
)
HINTS = Metric(
    "cache_hints_total",
    Kind.COUNTER,
    "Hints about sessions: closed, granted, or over the budget of their tenant.",
    ("outcome",),
)
PD_IN_FLIGHT = Metric("pd_handoffs_in_flight", Kind.GAUGE, "Hand-offs in flight.", ("side",))
PD_ASKS = Metric(
    "pd_asks_total",
    Kind.COUNTER,
    "Requests for free blocks on a decode instance, sent (prefill) or received (decode).",
    ("side",),
)
PD_HANDOFFS = Metric("pd_handoffs_total", Kind.COUNTER, "Hand-offs that succeeded.", ("side",))
PD_REFUSALS = Metric(
    "pd_refusals_total", Kind.COUNTER, "Hand-offs that did not begin.", ("side", "reason")
)
PD_FAILURES = Metric(
    "pd_failures_total",
    Kind.COUNTER,
    "Hand-offs that began and failed.",
    ("side", "reason"),
)
PD_EXPIRED = Metric(
    "pd_leases_expired_total", Kind.COUNTER, "Leases whose term ran out.", ("side",)
)
PD_BYTES = Metric(
    "pd_bytes_total",
    Kind.COUNTER,
    "Bytes of blocks sent (prefill) or received and verified (decode).",
    ("side",),
)
PD_SECONDS = Metric(
    "pd_handoff_seconds_total",
    Kind.COUNTER,
    "Seconds of successful hand-offs, by phase; first_token is the total.",
    ("part",),
)
STORAGE_FAULTS = Metric(
    "storage_faults_total", Kind.COUNTER, "Failures of the storage backend.", ("reason",)
)
STORAGE_READ_BREAKER = Metric(
    "storage_breaker_open",
    Kind.GAUGE,
    "1 while reads from storage are stopped because they failed or hung; else 0.",
)
STORAGE_WRITE_BREAKER = Metric(
    "storage_write_breaker_open",
    Kind.GAUGE,
    "1 while writes to storage are stopped because they failed or hung; else 0.",
)
STORAGE_RECOVERIES = Metric(
    "storage_recoveries_total",
    Kind.COUNTER,
    "Times that a storage breaker closed again.",
)
STORAGE_THREADS_LOST = Metric(
    "storage_threads_lost",
    Kind.GAUGE,
    "Threads that hang in a storage call which has passed its deadline.",
)
CACHE_CONFIG = Metric(
    "cache_config_info",
    Kind.GAUGE,
    "Always 1; the labels describe the cache.",
    ("block_size", "num_gpu_blocks", "num_cpu_blocks"),
)

PROMPT_TOKENS = Metric(
    "prompt_tokens_total", Kind.COUNTER, "Prompt tokens of started requests."
)
PROMPT_TOKENS_BY_SOURCE = Metric(
    "prompt_tokens_by_source_total",
    Kind.COUNTER,
    "Prompt tokens by where their KV came from.",
    ("source",),
)
COMPUTED_TOKENS = Metric(
    "prompt_tokens_computed_total",
    Kind.COUNTER,
    "Prompt tokens that were computed. All of a request count for one reason: why its first "
    "missing block was not found.",
    ("reason",),
)
GENERATION_TOKENS = Metric("generation_tokens_total", Kind.COUNTER, "Tokens generated.")
SUCCESS = Metric(
    "request_success_total", Kind.COUNTER, "Sequences that ended.", ("finished_reason",)
)
REFUSED = Metric(
    "requests_refused_total", Kind.COUNTER, "Requests refused because the queue was full."
)
SEQUENCES_BY_KEY = Metric(
    "sequences_by_key_total",
    Kind.COUNTER,
    "Sequences that ended, by the name of their API key; only with --key-metrics.",
    ("key",),
)
TOKENS_BY_KEY = Metric(
    "tokens_by_key_total",
    Kind.COUNTER,
    "Prompt and output tokens, by the name of their API key; only with --key-metrics.",
    ("key",),
)
TTFT = Metric(
    "time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "Seconds from the arrival of a sequence to its first token.",
    buckets=_FAST,
)
ITL = Metric(
    "inter_token_latency_seconds",
    Kind.HISTOGRAM,
    "Seconds between two tokens of a sequence.",
    buckets=_FAST,
)
E2E = Metric(
    "e2e_request_latency_seconds",
    Kind.HISTOGRAM,
    "Seconds from the arrival of a sequence to its end.",
    buckets=_SLOW,
)
QUEUE = Metric(
    "request_queue_time_seconds",
    Kind.HISTOGRAM,
    "Seconds from the arrival of a sequence to its admission.",
    buckets=_FAST,
)

ENGINE_METRICS = (
    RUNNING,
    WAITING,
    KV_USAGE,
    PREEMPTIONS,
    STEPS,
    IDLE_TURNS,
    COMPILATIONS,
    STEP_SECONDS,
    DECIDE_SECONDS,
    QUERIES,
    HITS,
    MISSES,
    TIER_BLOCKS,
    TIER_EVICTED,
    DUPLICATES,
    UNWRITTEN,
    LOST_BLOCKS,
    TRANSFER_BYTES,
    TRANSFER_SECONDS,
    TRANSFER_JOBS,
    TRANSFER_FAILURES,
    TRANSFER_CEILING,
    TRANSFER_QUEUE,
    LOAD_CHOICES,
    EXPECTED_SECONDS,
    ACTUAL_SECONDS,
    ERROR_SECONDS,
    HINTS,
    PD_IN_FLIGHT,
    PD_ASKS,
    PD_HANDOFFS,
    PD_REFUSALS,
    PD_FAILURES,
    PD_EXPIRED,
    PD_BYTES,
    PD_SECONDS,
    STORAGE_FAULTS,
    STORAGE_READ_BREAKER,
    STORAGE_WRITE_BREAKER,
    STORAGE_RECOVERIES,
    STORAGE_THREADS_LOST,
    CACHE_CONFIG,
)
"""Metrics read from the engine's snapshot."""

SERVER_METRICS = (
    PROMPT_TOKENS,
    PROMPT_TOKENS_BY_SOURCE,
    COMPUTED_TOKENS,
    GENERATION_TOKENS,
    SUCCESS,
    REFUSED,
    SEQUENCES_BY_KEY,
    TOKENS_BY_KEY,
    TTFT,
    ITL,
    E2E,
    QUEUE,
)
"""Metrics counted in the HTTP workers, which see requests as their clients do."""

ALL = (ENGINE_UP, VIOLATIONS, ENGINE_RESTARTS, *ENGINE_METRICS, *SERVER_METRICS)
"""All metrics of a server."""

SCRAPED_BY_ROUTERS = (RUNNING, WAITING, KV_USAGE, QUERIES, HITS, CACHE_CONFIG)
"""Metrics that can also be exposed under the `vllm:` prefix."""
