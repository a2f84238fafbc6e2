"""The simulator: the real loop on a virtual clock, with the same bytes each time."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError
from headwater.replay.presets import preset
from headwater.replay.report import make_report
from headwater.replay.simulator import Simulator
from headwater.replay.slo import parse_slo
from headwater.replay.trace import TraceRequest
from headwater.scheduler.request import Request, SamplingParams
from headwater.testing.engines import make_echo_core
from headwater.types import RequestId
from tests.replay.traces import gib, make_config, make_machine, make_request, make_small_trace
from tests.search import search

TIERS = {"host_gib": gib(256), "write_policy": "write_through"}
STORED = {**TIERS, "storage_gib": gib(2000)}

APART = {"num_instances": 3, "num_prefill": 1, "prefill_threshold": 16}


def replay(requests, bounds="", **changes: Any):
    run = Simulator(make_config(**changes), requests).run()
    for instance in run.instances:
        instance.core.check()
    return make_report(run, parse_slo(bounds))


@pytest.mark.slow
@search(examples=12)
@given(
    seed=st.integers(0, 1000),
    every_s=st.sampled_from([0.005, 0.03, 0.2]),
    tiers=st.sampled_from([{}, TIERS, STORED, {**STORED, "write_policy": "write_back"}]),
    cluster=st.sampled_from([{}, {"num_instances": 3}, APART]),
    load_policy=st.sampled_from(["priced", "best_effort", "wait", "deadline"]),
)
def test_steps_taken_at_once_give_what_steps_one_by_one_give(
    seed, every_s, tiers, cluster, load_policy
):
    """The whole report is equal, bit for bit: idle or overloaded, with copies in flight, with
    preemptions."""
    requests = make_small_trace(60, seed=seed, every_s=every_s)
    settings = {**tiers, **cluster, "load_policy": load_policy}
    fast = replay(requests, "ttft_p99=1s,itl_p90=5ms", **settings)
    slow = replay(requests, "ttft_p99=1s,itl_p90=5ms", **settings, fast_forward=False)

    assert json.dumps(fast) == json.dumps(slow)


def test_steps_are_taken_at_once_where_nothing_is_decided():
    """Many steps take few turns of the loop, with an empty queue and with a request in the
    queue for which there is no room."""
    for device_blocks in (40, 24):
        requests = [TraceRequest([n], 500, 600, 0.0, 512) for n in range(2)]
        config = make_config(block_tokens=64, device_gib=gib(4 * device_blocks))
        run = Simulator(config, requests).run()
        (instance,) = run.instances
        waited = sum(row[0] for row in instance.samples.rows) > 5

        assert waited == (device_blocks == 24)
        assert instance.num_turns < 0.3 * instance.core.stats().num_steps


def test_the_same_trace_gives_the_same_bytes():
    """With everything enabled, nothing depends on memory addresses or the time of day."""
    requests = make_small_trace(80)

    first, second = (json.dumps(replay(requests, **STORED, num_instances=2)) for _ in range(2))
    assert first == second


def serve_live(requests, *, num_blocks):
    """What the loop, scheduler and cache find for each request, with an echo runner."""
    core = make_echo_core(
        num_blocks=num_blocks, block_tokens=16, max_num_seqs=16, max_model_len=4096
    )
    found = {}
    for number, request in enumerate(requests):
        core.add(
            Request(
                request_id=RequestId(str(number)),
                tokens=request.prompt(),
                params=SamplingParams(max_tokens=request.output_length, ignore_eos=True),
                arrival_s=0.0,
            )
        )
        while core.has_work:
            for output in core.step():
                if output.usage is not None:
                    found[number] = output.usage.cached_tokens
    return [found[number] for number in range(len(requests))]


def test_a_replay_finds_what_a_live_engine_finds():
    """Hits are equal request by request, with evictions, for a live engine that serves the same
    requests."""
    requests = [
        TraceRequest(request.hash_ids, request.input_length, 20, 10.0 * number, 16)
        for number, request in enumerate(make_small_trace(150))
    ]
    config = make_config(max_batched_tokens=256)
    run = Simulator(config, requests).run()
    found = [one.usage.cached_tokens for one in run.instances[0].served if one.usage]

    assert run.instances[0].cache.stats().evicted_device > 100
    assert found == serve_live(requests, num_blocks=config.cache().device_blocks)


def test_every_token_has_a_source_and_every_miss_a_reason():
    """Sources add up to the prompts; links carry the offloads and loads."""
    report = replay(make_small_trace(120), **STORED)

    assert sum(report["tokens_by_source"].values()) == report["prompt_tokens"]
    assert report["tokens_by_source"]["host"] > 0
    assert sum(report["misses_by_reason"].values()) <= report["requests"]
    assert report["bytes_per_link"]["device_to_host"] > 0
    assert report["bytes_per_link"]["host_to_device"] % (16 * 64) == 0
    assert 0 < report["busy_share_per_link"]["device_to_host"] <= 1
    assert max(report["over_time"]["host_gib"]) <= report["settings"]["host_gib"]
    assert report["token_hit"] <= report["token_hit_ceiling"] < 1


def test_simulated_time_follows_the_cost_model():
    """The time of one request alone was calculated by hand: 128 + 32 tokens in two steps, then
    three tokens more."""
    step = make_machine().step
    report = replay([TraceRequest(list(range(10)), 160, 4, 5.0, 16)])
    first = step.launch_s + 128 * step.token_s + 128 * 129 // 2 * step.pair_s
    pairs = 32 * 128 + 32 * 33 // 2
    second = step.launch_s + max(step.weights_s, 32 * step.token_s) + pairs * step.pair_s
    gaps = [
        step.launch_s + step.weights_s + step.row_s + context * step.context_token_s
        for context in (161, 162, 163)
    ]

    assert report["ttft_ms"]["p50"] == pytest.approx(1e3 * (first + second))
    assert report["itl_ms"]["max"] == pytest.approx(1e3 * gaps[-1])
    assert report["e2e_ms"]["p50"] == pytest.approx(1e3 * (first + second + sum(gaps)))
    assert report["throughput"] == pytest.approx(4 / (first + second + sum(gaps)))


def test_goodput_counts_the_requests_that_kept_every_bound():
    """Of two requests at once on a machine for one, the second waits too long."""
    machine = make_machine(max_num_seqs=1)
    requests = [TraceRequest([n], 16, 50, 0.0, 16) for n in range(2)]
    report = replay(requests, "ttft_p99=50ms,itl_p99=10ms", machine=machine)
    slo = report["slo"]

    assert slo["good_share"] == 0.5
    assert slo["goodput_requests_per_s"] == pytest.approx(1 / report["duration_s"])
    assert slo["goodput_tokens_per_s"] == pytest.approx(50 / report["duration_s"])
    assert not slo["bounds"]["ttft_p99"]["met"]
    assert slo["bounds"]["itl_p99"]["met"]


def test_an_invalid_slo_gets_a_message_with_an_example():
    """The message shows how an SLO is written."""
    for wrong in ("ttft=2s", "ttft_p99=2", "p99=2s", "ttft_p99<2s"):
        with pytest.raises(ConfigError, match="for example"):
            parse_slo(wrong)
    assert [bound.limit_s for bound in parse_slo("ttft_p99=2s,itl_p50=1.5ms")] == [2.0, 0.0015]


def test_a_prompt_that_does_not_fit_is_refused_and_counted():
    """A prompt longer than the device is refused, and delays no other request."""
    requests = [TraceRequest(list(range(200)), 3200, 5, 0.0, 16), *make_small_trace(5)]
    report = replay(requests)

    assert (report["requests"], report["refused"]) == (6, 1)


def test_instances_share_storage_and_nothing_else():
    """With storage an instance finds what the other one stored; without storage it does not."""
    path = list(range(12))
    requests = [TraceRequest(path, 192, 2, at_s, 16) for at_s in (0.0, 60.0)]
    apart = {"num_instances": 2, "router": "round_robin"}
    alone = replay(requests, **apart, **TIERS)
    # Loading is always better if computing is slow.
    slow = make_machine()
    stored = replay(requests, **apart, **STORED, machine=slow, load_policy="wait")

    assert alone["token_hit"] == 0
    assert stored["tokens_by_source"]["storage"] == 11 * 16


def test_a_busy_router_spreads_requests():
    """With the least-load policy no request waits while another instance is idle."""
    requests = [TraceRequest([n], 16, 40, 0.0, 16) for n in range(8)]
    run = Simulator(make_config(num_instances=4, router="least_load"), requests).run()

    assert [len(instance.served) for instance in run.instances] == [2, 2, 2, 2]


def test_a_router_that_knows_caches_finds_more():
    """With the real policies, conversations stay where their blocks are, and the load is
    balanced."""
    requests = make_small_trace(150, every_s=0.1)
    hits = {
        router: replay(requests, num_instances=4, router=router)["token_hit"]
        for router in ("round_robin", "cache_aware")
    }

    assert hits["cache_aware"] > 1.2 * hits["round_robin"]


def test_prefill_and_decode_find_what_one_instance_finds():
    """Lesson 48: the same prompts go through the real protocol; nothing fails, and blocks that
    the decode instance has are not sent again."""
    requests = [
        replace(request, arrival_s=10.0 * number)
        for number, request in enumerate(make_small_trace(60))
    ]
    large = {"device_gib": gib(4000)}
    mixed = replay(requests, **large)
    apart = replay(requests, **large, num_instances=2, num_prefill=1, prefill_threshold=0)
    handed = sum(request.input_length for request in requests) * 64

    assert apart["token_hit"] == mixed["token_hit"] > 0.3
    assert apart["handoffs"]["failures"] == {}
    assert 0 < apart["handoffs"]["done"] <= 60
    assert 0 < apart["handoffs"]["bytes"] < 0.7 * handed
    assert apart["bytes_per_link"]["peer"] >= apart["handoffs"]["bytes"]


def test_prompts_computed_elsewhere_do_not_hold_up_decoding():
    """A long prompt delays the next tokens of other requests, unless another instance computes
    it."""
    decoding = [TraceRequest([n], 16, 200, 0.0, 16) for n in range(4)]
    long = TraceRequest(list(range(100, 180)), 1280, 5, 0.1, 16)
    machine = make_machine(max_batched_tokens=1300)
    gaps = [
        replay([*decoding, long], **settings, machine=machine, device_gib=gib(400))["itl_ms"]
        for settings in ({}, APART | {"num_instances": 2})
    ]

    assert gaps[0]["max"] > 10 * gaps[0]["p50"]
    assert gaps[1]["max"] < 2 * gaps[1]["p50"]


def test_a_prefill_instance_that_cannot_keep_up_is_helped():
    """Lessons 49, 56 and 57: prompts come twice as fast as one P computes them; none is
    refused, computed twice or left waiting, and 1 P + 3 D is about as fast as four mixed
    instances."""
    requests = [
        make_request(range(24 * at, 24 * at + 24), at_s=0.16 * at, output=200)
        for at in range(300)
    ]
    large: dict[str, Any] = {"machine": preset("h200-8b"), "block_tokens": 512}
    mixed = replay(requests, **large, num_instances=4)
    apart = replay(requests, **large, num_instances=4, num_prefill=1)
    alone = replay(requests, **large, num_instances=1)

    assert alone["requests_per_s"] < 0.6 * mixed["requests_per_s"]
    assert apart["handoffs"]["failures"] == {}
    assert apart["handoffs"]["done"] > 100
    assert apart["requests_per_s"] > 0.9 * mixed["requests_per_s"]
    assert apart["ttft_ms"]["p99"] < 10_000


def test_impossible_deployments_are_refused():
    """Each impossible deployment has its own message."""
    for changes, message in (
        ({"num_instances": 0}, "at least 1 instance"),
        ({"storage_gib": 1.0}, "needs a host tier"),
        ({"host_gib": -1.0}, "must be a size"),
        ({"device_gib": 0.0}, "is too small for one block"),
        ({"router": "nearest"}, "unknown routing policy"),
        ({"num_instances": 2, "num_prefill": 2}, "must decode, got 2 prefill instances"),
    ):
        with pytest.raises(ConfigError, match=message):
            Simulator(make_config(**changes), [])
    with pytest.raises(ConfigError, match="no figures for"):
        Simulator(make_config(machine=make_machine(links={}), **TIERS), [])


def test_gaps_between_tokens_are_each_counted():
    """There is one gap for each token after the first, with and without fast-forward."""
    requests = make_small_trace(30)
    run = Simulator(make_config(), requests).run()
    served = run.instances[0].served

    assert all(len(one.gaps_s) == one.num_output - 1 for one in served)
    assert all(
        one.num_output == r.output_length for one, r in zip(served, requests, strict=True)
    )
    assert np.all(np.concatenate([np.frombuffer(one.gaps_s) for one in served]) > 0)
