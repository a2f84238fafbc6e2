"""Rates between two answers of a server."""

from headwater.metrics.names import TTFT
from headwater.metrics.rates import quantiles, rates_between
from headwater.metrics.recorder import Histogram


def make_answer(
    *, uptime_s, output, found, computed, moved, counts, started_s=100, role="mixed"
):
    latency = {"bounds": [0.1, 1.0], "counts": counts, "sum_s": 0.0}
    return {
        "started_s": started_s,
        "uptime_s": uptime_s,
        "role": role,
        "totals": {
            "generation_tokens_total": output,
            "prompt_tokens_total": found + computed,
            "prompt_tokens_by_source_total": {"device": found, "computed": computed},
            "prompt_tokens_computed_total": {"never_seen": computed},
        },
        "latencies": {"ttft": latency, "itl": latency},
        "cache": {
            "links": {"host_to_device": {"num_bytes": moved}},
            "ledger": {
                "query_tokens": found + computed,
                "found_tokens": {"device": found, "host": 0},
            },
        },
    }


BEFORE = make_answer(
    uptime_s=10.0, output=100, found=0, computed=0, moved=1000, counts=[5, 0, 0]
)


def test_rates_are_what_came_between_over_the_time_between():
    """Tokens, shares and bytes per second are rates between two answers; percentiles are of new
    observations only."""
    now = make_answer(
        uptime_s=12.0, output=300, found=30, computed=10, moved=5000, counts=[5, 4, 0]
    )

    rates = rates_between(BEFORE, now)

    assert rates is not None
    assert (rates.output_tokens, rates.prompt_tokens) == (100.0, 20.0)
    assert rates.hit_share == 0.75
    assert rates.links == {"host_to_device": 2000.0}
    assert rates.ttft is not None
    assert 0.1 < rates.ttft.p50_s < rates.ttft.p99_s <= 1.0
    assert rates.computed_by_reason == {"never_seen": 5.0}


def test_counters_of_a_replaced_engine_are_never_negative_rates():
    """A counter that decreased has started at 0 again, so its whole value was counted between
    the answers."""
    now = make_answer(
        uptime_s=12.0, output=100, found=0, computed=0, moved=400, counts=[5, 0, 0]
    )

    rates = rates_between(BEFORE, now)

    assert rates is not None
    assert rates.links == {"host_to_device": 200.0}


def test_the_prompts_of_a_prefill_instance_are_those_handed_to_it():
    """Prompts come from decode instances, so the HTTP server of a prefill instance counts
    none."""

    def handed(found, computed, uptime_s):
        answer = make_answer(
            uptime_s=uptime_s,
            output=0,
            found=found,
            computed=computed,
            moved=0,
            counts=[0, 0, 0],
            role="prefill",
        )
        return answer | {"totals": BEFORE["totals"]}

    rates = rates_between(handed(0, 0, 10.0), handed(30, 10, 12.0))

    assert rates is not None
    assert rates.prompt_tokens == 20.0
    assert rates.by_source["device"] == 15.0
    assert rates.hit_share == 0.75


def test_another_server_has_no_rates():
    """Counters that start again do not give negative rates."""
    other = make_answer(
        uptime_s=12.0, output=1, found=0, computed=0, moved=0, counts=[0, 0, 0], started_s=111
    )

    assert rates_between(BEFORE, other) is None
    assert rates_between(BEFORE, BEFORE) is None


def test_quantiles_of_nothing_and_of_what_is_above_every_bound():
    """The result is None if nothing was observed, and the last bound for larger values."""
    nothing = {"bounds": [0.1, 1.0], "counts": [0, 0, 0]}

    assert quantiles(nothing, nothing) is None
    found = quantiles(nothing, {"bounds": [0.1, 1.0], "counts": [0, 0, 3]})
    assert found is not None
    assert found.p99_s == 1.0


def test_a_first_token_that_takes_longer_than_ten_seconds_is_not_shown_as_ten():
    """First tokens of an overloaded server take longer than ten seconds; its dashboard shows
    their real times."""
    slow = Histogram(TTFT.buckets)
    before = {"bounds": TTFT.buckets, "counts": list(slow.counts)}
    for _ in range(10):
        slow.observe(45.0)

    found = quantiles(before, {"bounds": TTFT.buckets, "counts": list(slow.counts)})

    assert found is not None
    assert 30 < found.p50_s < found.p99_s <= 60
