"""Disaggregated = local, token for token, over random conversations and caches in any state."""

from dataclasses import replace

from hypothesis import given
from hypothesis.strategies import booleans, composite, integers, lists, sampled_from, tuples

from headwater.disagg.protocol.config import HandoffConfig
from headwater.scheduler.request import Request
from headwater.testing.peers import EchoPair
from headwater.testing.tiers import make_echo_request, uncached_tokens
from tests.disagg.requests import make_handoff, make_prompt
from tests.search import search

CONVERSATIONS = 3


@composite
def turns(draw):
    """For each turn: which conversation continues, by how many tokens, where it is served, and
    which cache is reset before the turn."""
    return draw(
        lists(
            tuples(
                integers(0, CONVERSATIONS - 1),
                integers(1, 19),
                integers(1, 9),
                sampled_from(("handoff", "handoff", "handoff", "p", "d")),
                sampled_from((None, None, None, "p", "d")),
                booleans(),
            ),
            min_size=1,
            max_size=10,
        )
    )


@search(examples=150)
@given(turns(), sampled_from((1, 2)), integers(28, 60), integers(28, 60))
def test_random_conversations_get_the_tokens_they_get_on_one_instance(
    script, depth, p_blocks, d_blocks
):
    """Tokens are equal with partial hits on P, on D and on both, and with D's prefix longer
    than P's."""
    pair = EchoPair(
        p_num_blocks=p_blocks,
        d_num_blocks=d_blocks,
        depth=depth,
        settings={"max_batched_tokens": 64},
    )
    history = {number: make_prompt(9, family=number) for number in range(CONVERSATIONS)}
    alive: list[Request] = []
    for at, (number, more, out, where, reset, waits) in enumerate(script):
        if reset is not None:
            (pair.prefill if reset == "p" else pair.decode).core.reset_cache()
        tokens = (history[number] + make_prompt(more, family=at))[:100]
        request = make_echo_request(f"r{at}", tokens, max_tokens=out)
        history[number] = tokens + uncached_tokens(request)
        if where == "handoff":
            request = make_handoff(f"r{at}", tokens, max_tokens=out)
        peer = pair.prefill if where == "p" else pair.decode
        peer.add(request)
        alive.append(request)
        while waits and f"r{at}" not in peer.reasons:
            pair.turn()
            pair.clock.advance(0.01)
    for request in alive:
        while not any(request.request_id in peer.reasons for peer in pair.peers):
            pair.turn()
            pair.clock.advance(0.01)
            assert pair.clock.now() < 100, "a request is stuck"
    pair.drain(within_s=3.0)

    for request in alive:
        got = [
            p.outputs[request.request_id] for p in pair.peers if request.request_id in p.outputs
        ]
        assert got == [uncached_tokens(replace(request, prefill=""))]
    for peer in pair.peers:
        peer.check_idle()


def begin_with_prefix_on_d(**options):
    """A pair of which only D has the first eight blocks of a prompt, and the hand-off of that
    prompt, which has begun."""
    pair = EchoPair(**options)
    tokens = make_prompt(41)
    pair.decode.add(make_echo_request("warm", tokens[:33], max_tokens=1))
    pair.run("warm")
    request = make_handoff("a", tokens)
    pair.decode.add(request)
    return pair, request


def test_a_prefix_that_only_d_has_is_not_sent():
    """D's prefix is longer than P's: P computes what it lacks and sends what D lacks."""
    pair, request = begin_with_prefix_on_d(config=HandoffConfig(pull_min_blocks=100))
    pair.run("a")

    assert pair.decode.outputs["a"] == uncached_tokens(replace(request, prefill=""))
    assert pair.fabric.num_bytes == (11 - 8) * 32
    assert pair.prefill.runner.num_tokens == 41


def test_a_prefix_that_only_d_has_is_read_when_that_is_cheaper():
    """P computes only what neither instance has, and reports where the rest came from."""
    pair, request = begin_with_prefix_on_d()
    pair.run("a")
    pair.drain()

    assert pair.decode.outputs["a"] == uncached_tokens(replace(request, prefill=""))
    assert pair.prefill.runner.num_tokens == 9
    assert pair.decode.usages["a"].cached_tokens == 32
    assert pair.decode.usages["a"].by_tier["peer"] == 32
    assert pair.fabric.num_bytes == (8 + 3) * 32
    for peer in pair.peers:
        peer.check_idle()


def test_blocks_that_d_has_on_its_host_tier_are_not_sent():
    """D matches over all its tiers: evicted blocks come back from the host, not from P."""
    pair = EchoPair(
        d_num_blocks=14, d_host_blocks=64, config=HandoffConfig(pull_min_blocks=100)
    )
    tokens = make_prompt(41)
    for name, prompt in (("warm", tokens[:33]), ("other", make_prompt(45, family=2))):
        pair.decode.add(make_echo_request(name, prompt, max_tokens=1))
        pair.run(name)
        pair.drain(within_s=2.0, step_s=0.05)  # everything is written to the host
    request = make_handoff("a", tokens)
    pair.decode.add(request)
    pair.run("a")
    stats = pair.decode.core.stats()

    assert pair.decode.outputs["a"] == uncached_tokens(replace(request, prefill=""))
    assert pair.fabric.num_bytes == (11 - 8) * 32
    assert stats.found_tokens["host"] > 0
    assert stats.links["host_to_device"].num_blocks > 0


def test_a_peer_read_that_times_out_is_computed():
    """The link does not deliver: P waits until its timeout, then computes everything."""
    pair, request = begin_with_prefix_on_d()
    for _ in range(70):
        pair.turn(blocks=pair.prefill.runner.num_tokens > 0)
        pair.fabric.expire(pair.clock.now())
        pair.clock.advance(0.1)
    pair.run("a")
    pair.drain()

    assert pair.decode.outputs["a"] == uncached_tokens(replace(request, prefill=""))
    assert pair.prefill.runner.num_tokens == 41
    for peer in pair.peers:
        peer.check_idle()


def test_blocks_of_an_aborted_read_are_written_to_held_slots_only():
    """The client disconnects during the read: P keeps the slots until the lease is closed."""
    pair, request = begin_with_prefix_on_d()
    for _ in range(8):
        pair.turn(blocks=False)
    (transfer,) = pair.fabric.transfers
    pair.decode.core.abort(request.request_id)
    for _ in range(4):
        pair.turn(blocks=False, fences=False)
    held = pair.prefill.cache.stats().device.held
    while transfer in pair.fabric.transfers:
        pair.fabric.move(
            transfer
        )  # the fabric asserts that bytes are written to held slots only
    pair.drain()

    assert pair.decode.reasons["a"] == "abort"
    assert held == 11
    assert pair.prefill.runner.num_tokens == 0
    for peer in pair.peers:
        peer.check_idle()


def test_a_prompt_that_d_has_all_of_moves_no_byte():
    """Only the first token is sent."""
    pair = EchoPair()
    tokens = make_prompt(40)
    for name in "ab":
        pair.decode.add(make_handoff(name, tokens))
        pair.run(name)

    assert pair.fabric.num_bytes == 10 * 32
    assert pair.decode.outputs["a"] == pair.decode.outputs["b"]
    assert pair.prefill.usages == {}
    assert pair.decode.usages["b"].cached_tokens == 36
