"""`headwater plan`: sweeps, comparisons, prices, and a list of its limits."""

import json

import pytest

from headwater.cli import main
from headwater.errors import ConfigError
from headwater.replay.plan import Grid, _mark_pareto, _per_tib
from headwater.replay.prices import DEFAULT_PRICES, parse_prices
from headwater.replay.verdict import choose, verdict
from tests.replay.test_replay_command import write_trace
from tests.replay.traces import gib, make_config


@pytest.fixture
def trace(tmp_path):
    return write_trace(tmp_path / "trace.jsonl")


def make_point(price, ttft_p99, *, host=0.0, token_hit=0.0, instances=1, good=None):
    slo = None if good is None else {"goodput_requests_per_s": good, "met": True}
    return {
        "settings": {
            "instances": instances,
            "prefill_instances": 0,
            "device_gib": 1.0,
            "host_gib": host,
            "storage_gib": 0.0,
            "eviction": "lru",
        },
        "price": price,
        "token_hit": token_hit,
        "throughput": 100.0 * token_hit,
        "ttft_ms": {"p50": ttft_p99 / 2, "p99": ttft_p99},
        "slo": slo,
        "refused": 0,
    }


def test_a_grid_tries_every_combination_that_makes_sense():
    """Storage without a host tier is left out; too many combinations are refused."""
    grid = Grid(
        device_gib=[gib(64), gib(128)],
        host_gib=[0.0, gib(64)],
        storage_gib=[0.0, gib(512)],
        clusters=[(1, 0), (3, 1)],
        eviction=["lru"],
        write_policy=["auto"],
        load_policy=["priced"],
    )
    configs = grid.configs(make_config())

    assert len(configs) == 2 * 3 * 2
    assert all(config.host_gib or not config.storage_gib for config in configs)
    many = Grid(
        device_gib=[gib(n) for n in range(1, 600)],
        host_gib=[0.0],
        storage_gib=[0.0],
        clusters=[(1, 0)],
        eviction=["lru"],
        write_policy=["auto"],
        load_policy=["priced"],
    )
    with pytest.raises(ConfigError, match="fewer values"):
        many.configs(make_config())


def test_the_front_has_the_plans_that_no_other_beats_for_its_price():
    """The front was checked by hand: it has neither the expensive slow plan nor one that costs
    more for the same."""
    points = [make_point(*pair) for pair in ((1, 900), (2, 500), (3, 600), (4, 500), (5, 100))]
    _mark_pareto(points)
    assert [point["pareto"] for point in points] == [True, True, False, False, True]

    points = [make_point(p, 1, good=g) for p, g in ((1, 0.5), (2, 0.4), (3, 0.9))]
    _mark_pareto(points)
    assert [point["pareto"] for point in points] == [True, False, True]


def test_the_verdict_without_an_slo_is_the_cheapest_that_is_nearly_as_fast_as_the_best():
    """The first token of that deployment is within 5 % of the best; the verdict says what more
    money would buy."""
    pairs = ((1, 1000), (2, 520), (4, 500))
    points = [make_point(*pair) | {"name": f"size {pair[0]}"} for pair in pairs]

    chosen = choose(points)

    assert chosen == 1
    message = verdict(points, chosen)
    assert message.startswith("size 2 is enough: compared with size 1")
    assert "(-48 %)" in message
    assert "size 4 at 2.00 times the price changes the first-token p99 by -4 %" in message


def test_the_verdict_does_not_recommend_a_higher_price_for_nothing():
    """A deployment that is faster by less than 1 % is not named."""
    points = [
        make_point(p, t, good=1.0) | {"name": f"size {p}"} for p, t in ((1, 500), (2, 499))
    ]

    assert verdict(points, 0).endswith("no deployment that costs more is faster by 1 %.")


def test_a_deployment_that_refuses_requests_is_not_recommended():
    """Such a deployment has the best latencies because it serves nothing."""
    points = [make_point(*pair) | {"name": f"size {pair[0]}"} for pair in ((1, 0), (2, 500))]
    points[0]["refused"] = 40

    assert choose(points) == 1
    assert verdict(points, 1).startswith("size 2 is enough: it is also the cheapest")


def test_a_plan_does_not_take_refused_requests_for_fast_ones(trace, capsys):
    """A device that is too small for every request of the trace does not meet the SLO. The
    report names it, and shows sizes with few digits."""
    flags = ["--device-gib", "0.02,4", "--slo", "ttft_p99=20s", "--jobs", "1"]
    assert main(["plan", trace, *flags]) == 0
    printed = capsys.readouterr().out

    assert "1 deployment is too small" in printed
    assert "1 x 4 / 0 / 0 GiB is enough and meets the SLO" in printed


def test_the_verdict_says_when_nothing_meets_the_slo_and_memory_does_not_help():
    """Ten per cent faster at five times the price does not help."""
    points = [
        make_point(p, t, good=0.1) | {"name": f"size {p}"} for p, t in ((1, 900), (5, 880))
    ]
    for point in points:
        point["slo"]["met"] = False

    assert choose(points) is None
    message = verdict(points, None)
    assert "No deployment that was tried meets the SLO" in message
    assert "More memory does not help" in message


def test_one_more_tib_is_by_the_memory_of_all_instances():
    """The gain was checked by hand: 512 GiB more on each of two instances is one TiB, and
    gained 10 points of hits."""
    points = [
        make_point(1, 900, host=0.0, token_hit=0.2, instances=2),
        make_point(2, 400, host=512.0, token_hit=0.3, instances=2),
    ]
    (gain,) = _per_tib(points, "host")

    assert (gain["from_gib"], gain["to_gib"]) == (0.0, 512.0)
    assert gain["token_hit"] == pytest.approx(0.1)
    assert gain["ttft_p99_ms"] == -500
    assert gain["throughput"] == pytest.approx(10)
    assert _per_tib(points, "device") == []


def test_prices_are_of_instances_and_of_every_gib():
    """The tiers of each instance are counted, storage once; missing prices are the defaults."""
    prices = parse_prices(["instance=100,host=1024", "storage=2048", "device=0"])
    config = make_config(num_instances=3, host_gib=gib(1024), storage_gib=gib(2048))
    gibs = gib(1024)

    assert prices.of(config) == pytest.approx(300 + 3 * 1024 * gibs + 2048 * 2 * gibs)
    assert parse_prices([]).by_name["device"] == DEFAULT_PRICES["device"] > 0
    for wrong in ("host", "host=x", "gpu=3", "host=-1"):
        with pytest.raises(ConfigError, match="for example"):
            parse_prices([wrong])


@pytest.mark.slow
def test_a_plan_of_a_small_trace(trace, tmp_path, capsys):
    """Two processes compute every point; the plan has gains by TiB, the cheapest deployment
    within the SLO, and a picture."""
    flags = [
        "--device-gib",
        "0.5,4",
        "--host-gib",
        "0,2",
        "--slo",
        "ttft_p99=2s",
        "--jobs",
        "2",
    ]
    picture = ["--picture", str(tmp_path / "plan.svg")]
    assert main(["plan", trace, *flags, "--price", "host=3", "--json", *picture]) == 0
    plan = json.loads(capsys.readouterr().out)

    assert len(plan["points"]) == 4
    assert len(plan["per_tib"]["device"]) == len(plan["per_tib"]["host"]) == 1
    assert {"token_hit", "ttft_p99_ms", "throughput"} <= set(plan["per_tib"]["host"][0])
    cheapest = plan["points"][plan["cheapest_within_slo"]]
    assert cheapest["slo"]["met"]
    assert cheapest["pareto"]
    assert cheapest["price"] == min(point["price"] for point in plan["points"])
    assert any("not modelled" in thing for thing in plan["not_modelled"])
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")

    assert main(["plan", trace, *flags]) == 0
    printed = capsys.readouterr().out
    for word in (
        "is enough and meets the SLO",
        "write policy auto",
        "a cache without a size limit could find",
        "one TiB more of host",
        "not modelled",
        "prices",
    ):
        assert word in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host-gib", "much"], "must be a list"),
        (["--eviction", "mru"], "must be one of"),
        (["--price", "5"], "for example"),
        (["--slo", "quick"], "for example"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_mistakes_in_settings_get_a_message(trace, flags, message, capsys):
    """The message comes before any process starts."""
    assert main(["plan", trace, *flags]) == 1
    assert message in capsys.readouterr().err
