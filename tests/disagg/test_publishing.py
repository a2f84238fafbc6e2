"""What each instance of a pair commits, and when."""

import subprocess
import sys

from headwater.disagg.protocol.config import HandoffConfig
from headwater.testing.peers import EchoPair
from headwater.testing.tiers import make_echo_request
from tests.disagg.pairs import expected, matched, run, until
from tests.disagg.requests import make_handoff, make_prompt, make_storage

PROMPT = make_prompt(30)


def test_a_block_is_not_matchable_before_it_is_written():
    """Lesson 46: while the push is held up, the same prompt comes again and finds nothing."""
    pair = EchoPair(settings={"prefix_wait_min_blocks": 100})
    first, second = make_handoff("a", PROMPT), make_echo_request("b", PROMPT, max_tokens=6)
    pair.decode.add(first)
    until(pair, lambda: len(pair.fabric.transfers) > 0, blocks=False)

    assert matched(pair.decode, PROMPT) == 0
    pair.decode.add(second)
    for _ in range(20):
        pair.turn(blocks=False)
    assert pair.decode.outputs["b"] == expected(second)
    assert pair.decode.usages["b"].cached_tokens == 0
    pair.run("a")

    assert pair.decode.outputs["a"] == expected(first)


def test_a_new_request_waits_for_a_prefix_that_is_being_received():
    """Lesson 46: the request waits for the hand-off in flight, and finds the blocks once
    committed."""
    pair = EchoPair()
    pair.decode.add(make_handoff("a", PROMPT))
    until(pair, lambda: len(pair.fabric.transfers) > 0, blocks=False)
    pair.decode.add(make_handoff("b", PROMPT))
    for _ in range(10):
        pair.turn(blocks=False)
    pair.run("a", "b")

    assert pair.decode.outputs["b"] == expected(make_handoff("b", PROMPT))
    assert pair.fabric.num_bytes == (8 + 1) * 32  # all of the first, the tail of the second


def test_each_role_publishes_once_what_it_has():
    """Lesson 47: P publishes what it computed; D what it received, and then what it
    generated."""
    pair = EchoPair()
    request = make_handoff("a", PROMPT, max_tokens=11)
    run(pair, request)
    pair.drain()
    whole = PROMPT + pair.decode.outputs["a"]

    assert matched(pair.prefill, whole) == 30 // 4
    assert matched(pair.decode, whole) == 40 // 4  # the last token is chosen, not computed
    assert pair.decode.cache.stats().device.cached == 10
    assert pair.prefill.cache.stats().device.cached == 7


def test_hits_are_measured_on_both_sides():
    """Lesson 48: each side's counts are of its own tree, partial hits included."""
    pair = EchoPair()
    run(pair, make_handoff("a", PROMPT), make_handoff("b", PROMPT[:18] + [49] * 8))
    p_stats, d_stats = pair.prefill.core.stats(), pair.decode.core.stats()

    assert (p_stats.query_tokens, p_stats.found_tokens["device"]) == (56, 16)
    assert (d_stats.query_tokens, d_stats.found_tokens["device"]) == (56, 16)
    assert (
        pair.decode.usages["b"].cached_tokens == 16
    )  # blocks that neither instance had to compute
    assert pair.decode.usages["b"].computed == 10


def test_the_whole_protocol_runs_without_a_device_or_a_second_process():
    """Lesson 49: engines, state machines and messages run on a virtual clock, without torch."""
    script = (
        "import sys\n"
        "from headwater.testing.peers import EchoPair\n"
        "from tests.disagg.requests import make_handoff, make_prompt\n"
        "pair = EchoPair()\n"
        "pair.decode.add(make_handoff('a', make_prompt(30)))\n"
        "pair.run('a')\n"
        "assert pair.decode.handoffs.decode_side.totals.num_done == 1\n"
        "assert not {'torch', 'socket', 'zmq'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()


def test_the_next_turn_finds_in_shared_storage_what_d_generated():
    """Lesson 55: D commits its output, and with shared storage P need not read it from D."""
    pair = EchoPair(
        host_blocks=64,
        storage=make_storage(),
        config=HandoffConfig(pull_min_blocks=100),
        settings={"load_policy": "wait"},
    )
    run(pair, make_handoff("a", PROMPT, max_tokens=15))
    pair.drain(within_s=1.0, step_s=0.1)
    turn = PROMPT + pair.decode.outputs["a"] + make_prompt(5, family=3)
    before = pair.prefill.runner.num_tokens
    run(pair, make_handoff("b", turn))

    assert (
        pair.prefill.runner.num_tokens - before == len(turn) - 44
    )  # eleven blocks of 44 known
    usage = pair.decode.usages["b"]
    assert usage.by_tier["device"] == 28
    assert usage.by_tier["storage"] == 16
