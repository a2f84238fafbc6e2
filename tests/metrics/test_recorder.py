"""Counts and histograms of one server."""

from headwater.clock import VirtualClock
from headwater.metrics import names
from headwater.metrics.prometheus import render
from headwater.metrics.recorder import Histogram, Recorder, RequestTimer, SequenceProgress
from headwater.metrics.stats import EngineStats, LinkStats, TierStats
from headwater.scheduler.request import LoadUsage, SequenceOutput, Usage
from headwater.types import RequestId

PLACE = SequenceProgress(request_id="r-1", prompt_tokens=9, unix_s=1_000.0, token_bytes=8)


def make_output(num_tokens, usage=None):
    return SequenceOutput(
        request_id=RequestId("r"),
        tokens=[1] * num_tokens,
        logprobs=[None] * num_tokens,
        usage=usage,
    )


def test_a_histogram_counts_each_value_in_its_bucket():
    """A bound is inside its bucket; values above all bounds have their own bucket."""
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)

    assert histogram.counts == [2, 1, 1]
    assert histogram.total == 12.0


def test_a_sequence_is_timed_from_arrival_to_end():
    """The first token, each later token and the end are timed by the clock that was passed
    in."""
    clock, recorder = VirtualClock(), Recorder()
    usage = Usage(
        prompt_tokens=9, cached_tokens=4, by_tier={"device": 4}, computed=5, queued_s=0.5
    )
    timer = RequestTimer(recorder, clock)
    clock.advance(2.0)
    timer.record(make_output(1, usage))
    clock.advance(0.3)
    timer.record(make_output(3))
    clock.advance(1.0)
    record = timer.end("length", place=PLACE)

    assert recorder.histograms[names.TTFT].total == 2.0
    itl = recorder.histograms[names.ITL]
    assert (sum(itl.counts), round(itl.total, 6)) == (3, 0.3)
    assert recorder.histograms[names.E2E].total == 3.3
    assert recorder.histograms[names.QUEUE].total == 0.5
    assert recorder.counts[names.GENERATION_TOKENS, ""] == 4
    assert recorder.counts[names.PROMPT_TOKENS, ""] == 9
    assert recorder.counts[names.PROMPT_TOKENS_BY_SOURCE, "computed"] == 5
    assert recorder.counts[names.PROMPT_TOKENS_BY_SOURCE, "device"] == 4
    assert recorder.counts[names.SUCCESS, "length"] == 1
    assert record.start_unix_s == 1_000 - 3.3
    assert (record.first_token_s, round(record.inter_token_s or 0, 6)) == (2.0, 0.1)
    assert record.tokens_by_source == {"device": 4, "computed": 5}
    assert (record.output_tokens, record.queued_s, record.loaded_bytes) == (4, 0.5, 0)


def test_a_ledger_says_what_was_loaded_and_at_what_price():
    """The record has the bytes that came from below the device, and the priced decision."""
    load = LoadUsage(
        choice="load_cheaper",
        host_blocks=2,
        storage_blocks=1,
        num_blocks=3,
        load_s=0.1,
        recompute_s=0.4,
        chosen_s=0.1,
        waited_s=0.2,
        shortfall=None,
    )
    usage = Usage(
        prompt_tokens=20,
        cached_tokens=14,
        by_tier={"device": 2, "host": 8, "storage": 4},
        computed=6,
        miss_reason="never_seen",
        load=load,
    )
    timer = RequestTimer(Recorder(), VirtualClock())
    timer.record(make_output(1, usage))

    record = timer.end("stop", place=PLACE)

    assert record.loaded_bytes == 12 * PLACE.token_bytes
    assert record.load == load
    line = record.as_log()
    assert line["miss_reason"] == "never_seen"
    assert line["load"]["choice"] == "load_cheaper"
    assert "traceparent" not in line


def test_a_ledger_of_a_sequence_that_never_ran_says_so():
    """The sequence was aborted while it waited, so its record has no source, no completed wait
    and no token."""
    record = RequestTimer(Recorder(), VirtualClock()).end("abort", place=PLACE)

    assert (record.queued_s, record.first_token_s, record.inter_token_s) == (None, None, None)
    assert record.tokens_by_source == {}


def test_usage_counts_what_sequences_hold_once():
    """Lesson 62: cached blocks without a lease count as free; shared blocks count once."""
    tier = TierStats(num_blocks=10, free=2, held=3, cached=5, evictable=4)
    stats = EngineStats(tiers={"device": tier})

    text = render(Recorder(), stats, block_tokens=64).decode()

    assert "headwater:kv_cache_usage_perc 0.4" in text


def test_every_metric_has_a_name_once_and_a_help():
    """Names are unique; counters say so in their name; nothing is without an explanation."""
    metrics = names.ALL

    assert len({metric.name for metric in metrics}) == len(metrics)
    for metric in metrics:
        assert metric.help.endswith(".")
        assert (metric.kind is names.Kind.COUNTER) == metric.name.endswith("_total")
        assert (metric.kind is names.Kind.HISTOGRAM) == bool(metric.buckets)


def test_tiers_are_scraped_by_link_and_reason():
    """There are bytes and seconds of each link, failures by reason, jobs in flight, and load
    decisions."""
    link = LinkStats(
        num_jobs=3,
        num_blocks=8,
        num_bytes=4096,
        busy_s=0.5,
        failures={"timeout": 2},
        in_flight=1,
    )
    tier = TierStats(num_blocks=10, free=2, held=3, cached=5, evictable=4, evicted=7)
    stats = EngineStats(
        tiers={"host": tier}, links={"storage_to_host": link}, load_choices={"split": 4}
    )

    text = render(Recorder(), stats, block_tokens=64).decode()

    for line in (
        'headwater:transfer_bytes_total{link="storage_to_host"} 4096.0',
        'headwater:transfer_seconds_total{link="storage_to_host"} 0.5',
        'headwater:transfer_failures_total{link="storage_to_host",reason="timeout"} 2.0',
        'headwater:transfer_jobs_in_flight{link="storage_to_host"} 1.0',
        'headwater:tier_evicted_blocks_total{tier="host"} 7.0',
        'headwater:load_choices_total{reason="split"} 4.0',
    ):
        assert line in text
