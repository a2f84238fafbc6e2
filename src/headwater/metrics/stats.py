"""A snapshot of one engine in plain numbers, for the wire and for scrapes.

Counters only increase while the engine lives; the reader computes ratios.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headwater.scheduler.load_state import MeasuredRates
from headwater.scheduler.pacing import PredictionTotals
from headwater.scheduler.request import LoadUsage
from headwater.storage.base import StorageStats


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Blocks of one tier; free + held + cached = all of them."""

    num_blocks: int
    free: int
    held: int
    """Being filled by a running sequence."""

    cached: int
    """Findable; shared blocks are counted once."""

    evictable: int
    """Cached and not pinned."""

    evicted: int = 0
    """Blocks evicted from it since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStats:
    """Transfers between two tiers, or storage lookups, since the engine started."""

    num_jobs: int = 0
    num_blocks: int = 0
    """Blocks moved or looked up."""

    num_bytes: int = 0
    busy_s: float = 0.0
    """Seconds of work, over all threads."""

    failures: Mapping[str, int] = field(default_factory=dict)
    """Failed jobs, by reason."""

    fastest_bytes_s: float = 0.0
    """Speed of the fastest job; 0 before the first one, and for lookups."""

    in_flight: int = 0
    blocks_in_flight: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStats:
    """One side of the hand-offs with other instances, since the engine started."""

    in_flight: int = 0
    asks: int = 0
    done: int = 0
    """Hand-offs that succeeded."""

    refusals: Mapping[str, int] = field(default_factory=dict)
    """Hand-offs that did not begin, by reason."""

    failures: Mapping[str, int] = field(default_factory=dict)
    """Hand-offs that began and failed, by reason; `expired` are leases whose term ended."""

    num_bytes: int = 0
    """Bytes sent, or received and verified."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of successful hand-offs, by phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The counters of the engine between two steps."""

    num_running: int = 0
    num_waiting: int = 0
    is_paused: bool = False
    num_steps: int = 0
    num_preemptions: int = 0
    decide_s: float = 0.0
    """Seconds spent in scheduler and cache."""

    step_s: float = 0.0
    """Seconds spent in steps, including scheduling."""

    num_idle_turns: int = 0
    """Turns of the loop that received, scheduled, computed and sent nothing."""

    num_compilations: int = 0
    """Kernels that were compiled or loaded after the engine was ready; each delayed requests."""

    queue_s: float = 0.0
    """Sum of the seconds that admitted requests waited."""

    num_admitted: int = 0
    tiers: Mapping[str, TierStats] = field(default_factory=dict)
    """Statistics by tier name, fastest tier first."""

    links: Mapping[str, LinkStats] = field(default_factory=dict)
    """Statistics by link name: `host_to_device`, `device_to_host`, …, `lookup`."""

    storage: StorageStats | None = None
    """Statistics of the storage backend, if there is one."""

    load_choices: Mapping[str, int] = field(default_factory=dict)
    """Decisions between loading and computing, by reason."""

    rates: MeasuredRates = field(default_factory=MeasuredRates)
    """The measured rates behind these decisions."""

    predictions: Mapping[str, PredictionTotals] = field(default_factory=dict)
    """Expected and actual seconds of loads and of computing prompts, by kind."""

    num_duplicates: int = 0
    """Blocks that are on the device and on the host."""

    num_unwritten: int = 0
    """Cached device blocks that the host does not have; 0 without a host tier."""

    lost_blocks: int = 0
    """Blocks that left their last tier."""

    unstored_blocks: int = 0
    """The part of `lost_blocks` that left memory without being in storage."""

    recent_loads: tuple[LoadUsage, ...] = ()
    """The latest decisions, oldest first, with their prices and results."""

    handoffs: Mapping[str, HandoffStats] = field(default_factory=dict)
    """Statistics by side, `prefill` and `decode`; empty on an instance without hand-offs."""

    hints: Mapping[str, int] = field(default_factory=dict)
    """Hints of clients, by outcome."""

    num_sessions: int = 0
    """Named sessions that are known."""

    promised_blocks: int = 0
    """Blocks that are kept for sessions because of a hint."""

    queries: int = 0
    """Requests that looked up the prefix cache."""

    query_tokens: int = 0
    """Prompt tokens of those requests."""

    found_tokens: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens that were found, by tier name."""

    misses: Mapping[str, int] = field(default_factory=dict)
    """Requests whose match ended early, by the first reason."""
