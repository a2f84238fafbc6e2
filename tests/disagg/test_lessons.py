"""What went wrong in systems that split prefill from decode, each as a test of this one."""

import subprocess
import sys
from dataclasses import replace

import pytest

from headwater.cache import TokenPath
from headwater.disagg.handoff import HandoffConfig
from headwater.disagg.messages import Accepted, Ask, Cancel, Done, Failed, Grant, Reason, Renew
from headwater.scheduler.request import Request
from headwater.scheduler.sequence import SequenceState
from headwater.testing.peers import EchoPair, EchoPeer
from headwater.testing.tiers import make_echo_request, uncached_tokens
from tests.disagg.requests import make_handoff, make_prompt, make_storage

PROMPT = make_prompt(30)


def expected(request: Request) -> list[int]:
    """What the request yields on one instance without a cache."""
    return uncached_tokens(replace(request, prefill=""))


def run(pair: EchoPair, *requests: Request) -> None:
    """Serve these, one after the other, and see that each got its tokens."""
    for request in requests:
        pair.decode.add(request)
        pair.run(request.request_id)
        assert pair.decode.outputs[request.request_id] == expected(request)


def matched(peer: EchoPeer, tokens: list[int]) -> int:
    """Blocks of `tokens` that are findable on `peer`."""
    return peer.cache.match(TokenPath(tokens)).device_blocks


def until(pair: EchoPair, done: object, **held: bool) -> None:
    """Turn until `done()`; blocks or fences may be held."""
    for _ in range(200):
        if done():  # type: ignore[operator]
            return
        pair.turn(**held)
        pair.clock.advance(0.01)
    raise AssertionError("it never came to that")


def test_a_block_is_not_matchable_before_it_is_written():
    """Lesson 46: while the push is held up, the same prompt comes again and finds nothing."""
    pair = EchoPair(settings={"follow_min_blocks": 100})
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


def test_a_newcomer_waits_for_what_is_being_received_instead_of_receiving_it_twice():
    """Lesson 46: it follows the hand-off in flight, and finds the blocks once committed."""
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
    """Lesson 47: P what it computed; D what it received, and then what it generated."""
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
    assert pair.decode.usages["b"].cached_tokens == 16  # what nobody computed
    assert pair.decode.usages["b"].computed == 10


def test_the_whole_protocol_runs_without_a_device_or_a_second_process():
    """Lesson 49: engines, books, machines and messages, on a virtual clock, with no torch."""
    script = (
        "import sys\n"
        "from headwater.testing.peers import EchoPair\n"
        "from tests.disagg.requests import make_handoff, make_prompt\n"
        "pair = EchoPair()\n"
        "pair.decode.add(make_handoff('a', make_prompt(30)))\n"
        "pair.run('a')\n"
        "assert pair.decode.exchange.decodes.totals.num_done == 1\n"
        "assert not {'torch', 'socket', 'zmq'} & set(sys.modules), sorted(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()


def test_the_next_turn_finds_in_shared_storage_what_d_generated():
    """Lesson 55: D publishes its output, and with one storage for both P need not ask for it."""
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


def test_an_expired_lease_is_freed_once_and_only_when_the_link_is_quiet():
    """Lesson 50: P is silent, its bytes are late; the slots stay out of reach until then."""
    pair = EchoPair(num_blocks=10)
    request = make_handoff("a", PROMPT)
    pair.decode.add(request)
    until(pair, lambda: len(pair.fabric.transfers) > 0, blocks=False)
    pair.fabric.packets.clear()
    for _ in range(30):  # D alone: no heartbeat arrives any more
        pair.clock.advance(0.5)
        pair.decode.step()
        pair.fabric.packets.clear()
    assert pair.decode.exchange.decodes.totals.failures[Reason.EXPIRED] == 1
    assert pair.decode.cache.stats().device.held == 8
    for transfer in list(pair.fabric.transfers):  # arrives although the lease is over
        while transfer in pair.fabric.transfers:
            pair.fabric.move(transfer)
    pair.run("a")
    pair.drain()

    assert pair.decode.outputs["a"] == expected(request)
    pair.decode.check_idle()


def test_p_stops_pushing_before_its_term_ends():
    """Lesson 50: without an echo of its heartbeats P gives up first."""
    pair = EchoPair()
    pair.decode.add(make_handoff("a", PROMPT))
    until(pair, lambda: len(pair.fabric.transfers) > 0, blocks=False)
    end_s = pair.decode.exchange.decodes.lease_end_s(pair.fabric.transfers[0].push.lease)
    assert end_s is not None
    while pair.prefill.exchange.prefills.num_active:
        pair.fabric.packets.clear()
        pair.clock.advance(0.1)
        pair.prefill.step()

    assert pair.clock.now() < end_s
    pair.fabric.expire(pair.clock.now())
    pair.prefill.step()
    assert pair.prefill.exchange.prefills.totals.failures[Reason.EXPIRED] == 1


def test_heartbeats_begin_when_the_request_is_queued():
    """Lesson 50: a hand-off that waits long on P, behind others, does not expire on D."""
    pair = EchoPair(p_num_blocks=10, config=HandoffConfig(handoff_timeout_s=500.0))
    blocker = make_echo_request("long", make_prompt(20, family=1), max_tokens=18)
    pair.prefill.add(blocker)
    pair.turn()
    pair.decode.add(make_handoff("a", PROMPT))
    for _ in range(15):
        pair.turn()
        pair.clock.advance(2.0)
    pair.run("a", within_s=200)

    assert pair.decode.exchange.decodes.totals.num_done == 1


def test_repeated_asks_get_the_same_answer_and_take_nothing_more():
    """Lesson 51: the same lease, the same slots."""
    pair = EchoPair()
    pair.decode.add(make_handoff("a", PROMPT))
    until(pair, lambda: any(isinstance(p.message, Ask) for p in pair.fabric.packets))
    ask = next(p for p in pair.fabric.packets if isinstance(p.message, Ask))
    grants = []
    for _ in range(4):
        pair.fabric.deliver(ask, again=True)
        pair.decode.step()
        grants += [p.message for p in pair.fabric.packets if isinstance(p.message, Grant)]
        held = pair.decode.cache.stats().device.held
    pair.run("a")

    assert len(grants) > 4
    assert len(set(grants)) == 1
    assert held == 8
    assert pair.decode.exchange.decodes.totals.num_asks == 1


def test_a_restarted_peer_sees_nothing_that_was_said_to_the_one_before():
    """Lesson 51: messages on their way to a dead instance are gone with it."""
    pair = EchoPair()
    pair.decode.add(make_handoff("a", PROMPT))
    assert pair.fabric.packets
    pair.fabric.crash("p")
    pair.prefill = pair.make("p")
    pair.run("a")

    assert pair.prefill.exchange.prefills.totals.num_started == 0
    assert pair.decode.outputs["a"] == expected(make_handoff("a", PROMPT))


def test_a_late_grant_is_returned():
    """Lesson 51: P has given up by the time D grants; D hears it and lets go."""
    pair = EchoPair()
    pair.decode.add(make_handoff("a", PROMPT))
    is_granted = lambda: any(isinstance(p.message, Grant) for p in pair.fabric.packets)  # noqa: E731
    until(pair, is_granted)
    grant = next(p for p in pair.fabric.packets if isinstance(p.message, Grant))
    work = pair.prefill.exchange.prefills
    work.lost(grant.connection.name_at("p"), pair.clock.now())
    pair.turn()
    told = [p.message for p in pair.fabric.packets]

    assert any(isinstance(message, Failed) for message in told)
    pair.run("a")
    pair.drain()
    pair.decode.check_idle()
    pair.prefill.check_idle()


def test_one_unresponsive_d_blocks_nobody():
    """Lesson 52: P serves others, its own clients included, while one D does not answer."""
    pair = EchoPair()
    pair.decode.add(make_handoff("stuck", PROMPT))
    pair.turn()
    pair.turn()
    silent, pair.decode = pair.decode, pair.make("e")
    pair.fabric.packets.clear()
    other = make_handoff("b", make_prompt(22, family=2))
    local = make_echo_request("c", make_prompt(9, family=1), max_tokens=3)
    pair.prefill.add(local)
    pair.decode.add(other)
    pair.run("b")

    assert pair.decode.outputs["b"] == expected(other)
    assert pair.prefill.outputs["c"] == expected(local)
    assert "stuck" not in silent.reasons


def test_a_silent_p_makes_one_request_wait_and_not_all():
    """Lesson 52: it does not answer, although it is there: the first waits for a term, those that
    follow compute at once, and when P says something they are handed over again."""
    pair = EchoPair()
    waits = {}
    for name in "abc":
        began_s = pair.clock.now()
        pair.decode.add(make_handoff(name, make_prompt(20, family=ord(name) % 3)))
        while name not in pair.decode.reasons:
            pair.decode.step()
            pair.clock.advance(0.1)
        waits[name] = pair.clock.now() - began_s
    for _ in range(5):
        pair.turn()
    run(pair, make_handoff("d", make_prompt(25, family=4)))

    assert waits["a"] > 9.0
    assert max(waits["b"], waits["c"]) < 2.0
    assert pair.decode.exchange.decodes.totals.num_done == 1
    pair.drain()
    for peer in pair.peers:
        peer.check_idle()


def test_a_push_that_fails_is_told_at_once():
    """Lesson 53: D hears from P, computes from what landed, and waits for no timeout."""
    pair = EchoPair()
    request = make_handoff("a", PROMPT)
    pair.decode.add(request)
    until(pair, lambda: len(pair.fabric.transfers) > 0, blocks=False)
    (transfer,) = pair.fabric.transfers
    for _ in range(5):
        pair.fabric.move(transfer)
    pair.fabric.fail(transfer)
    pair.fabric.vanish(transfer)
    began_s = pair.clock.now()
    pair.run("a")

    assert pair.clock.now() - began_s < 1.0
    assert pair.decode.outputs["a"] == expected(request)
    assert pair.decode.usages["a"].cached_tokens == 5 * 4  # what landed whole was kept
    assert pair.decode.exchange.decodes.totals.failures == {Reason.PUSH: 1}
    assert pair.prefill.exchange.prefills.totals.failures == {Reason.PUSH: 1}


@pytest.mark.parametrize("when", range(8))
def test_an_abort_is_told_to_p_at_once_and_returns_every_slot(when):
    """Lessons 53 and 58: at any step of the hand-off."""
    pair = EchoPair()
    request = make_handoff("a", PROMPT)
    pair.decode.add(request)
    for _ in range(when):
        pair.turn(blocks=when % 2 == 0)
    pair.decode.core.abort(request.request_id)
    pair.run("a")
    pair.drain(within_s=3.0)

    assert pair.decode.reasons["a"] == "abort"
    assert pair.prefill.exchange.prefills.num_active == 0
    for peer in pair.peers:
        peer.check_idle()


def test_a_block_that_arrived_short_is_not_ready():
    """Lesson 54: the account is in bytes; what is not exact is computed."""
    pair = EchoPair()
    request = make_handoff("a", PROMPT)
    pair.decode.add(request)
    until(pair, lambda: len(pair.fabric.transfers) > 0, blocks=False)
    (transfer,) = pair.fabric.transfers
    lease = pair.fabric._leases[transfer.target][transfer.push.lease]
    while transfer in pair.fabric.transfers:
        pair.fabric.move(transfer)
    lease.landed[3] = 31  # the link's final account: a byte less than was sent
    pair.run("a")

    assert pair.decode.exchange.decodes.totals.failures == {Reason.ACCOUNT: 1}
    assert pair.decode.outputs["a"] == expected(request)


def test_the_second_turn_moves_only_the_new_part():
    """Lesson 55: D keeps what it got and what it generated, and asks for neither again."""
    pair = EchoPair()
    first = make_handoff("a", PROMPT, max_tokens=10)
    run(pair, first)
    before = pair.fabric.num_bytes
    turn = PROMPT + pair.decode.outputs["a"] + make_prompt(8, family=3)
    run(pair, make_handoff("b", turn))

    assert before == 8 * 32
    assert pair.fabric.num_bytes - before == (12 - 9) * 32  # 48 tokens; D has 39 of them


def test_a_preempted_request_on_d_resumes_from_its_tree():
    """Lesson 55: it is neither dropped nor sent again, and yields the same tokens."""
    pair = EchoPair(d_num_blocks=12)
    requests = [
        make_handoff(name, make_prompt(17, family=at), max_tokens=20)
        for at, name in enumerate("ab")
    ]
    for request in requests:
        pair.decode.add(request)
    pair.run("a", "b")

    assert pair.decode.core.stats().num_preemptions > 0
    assert pair.prefill.exchange.prefills.totals.num_started == 2
    for request in requests:
        assert pair.decode.outputs[request.request_id] == expected(request)


def test_a_request_that_cannot_resume_goes_back_to_who_can_continue_it():
    """Lesson 55: preempted, and out of room for long; its tokens so far are right ones."""
    pair = EchoPair(d_num_blocks=12, config=HandoffConfig(return_after_s=5.0))
    requests = [
        replace(make_handoff(name, make_prompt(17, family=at), max_tokens=20), can_return=True)
        for at, name in enumerate("ab")
    ]
    for request in requests:
        pair.decode.add(request)
    pair.run("a", "b", step_s=1.0)
    pair.drain()

    assert pair.decode.core.stats().num_preemptions > 0
    assert pair.decode.reasons == {"a": "length", "b": "returned"}
    for request in requests:
        tokens = pair.decode.outputs[request.request_id]
        assert tokens == expected(request)[: len(tokens)]
    pair.decode.check_idle()


def test_a_refusal_is_typed_and_leaves_nothing_behind():
    """Lesson 56: P is full, says so, and D declines, for a router to try another pair."""
    pair = EchoPair(config=HandoffConfig(max_inflight=1))
    pair.decode.add(make_handoff("a", PROMPT))
    pair.decode.add(make_handoff("b", make_prompt(9, family=1), computes_here=False))
    pair.run("a", "b")
    pair.drain()

    assert pair.decode.reasons == {"a": "length", "b": "refused"}
    assert pair.decode.outputs["b"] == []
    assert pair.prefill.exchange.prefills.totals.failures == {Reason.BUSY: 1}
    pair.decode.check_idle()


def test_a_refused_request_is_computed_where_it_is_if_it_may():
    """Lesson 56: the same refusal, and tokens all the same."""
    pair = EchoPair(config=HandoffConfig(max_inflight=1))
    requests = [make_handoff(name, make_prompt(9, family=at)) for at, name in enumerate("ab")]
    for request in requests:
        pair.decode.add(request)
    pair.run("a", "b")

    for request in requests:
        assert pair.decode.outputs[request.request_id] == expected(request)


def test_a_d_that_computes_prompts_of_its_own_takes_in_others_meanwhile():
    """Lessons 52 and 56: room for what is received takes no tokens of a step, so it waits neither
    for a long prompt that is being computed nor behind those that will be; nothing that P has
    computed is refused for that."""
    pair = EchoPair(d_num_blocks=200, settings={"max_batched_tokens": 8, "max_num_seqs": 8})
    own = [
        make_echo_request(f"own {at}", make_prompt(90, family=at), max_tokens=1)
        for at in (1, 2)
    ]
    handed = [make_handoff(f"handed {at}", make_prompt(30, family=at)) for at in (3, 4)]
    for request in (*own, *handed):
        pair.decode.add(request)
    pair.run(*(request.request_id for request in handed))

    assert "own 2" not in pair.decode.reasons
    for request in handed:
        assert pair.decode.outputs[request.request_id] == expected(request)
    pair.run("own 1", "own 2")
    assert pair.decode.exchange.decodes.totals.num_done == 2


def test_what_nothing_may_pass_is_not_passed_by_what_is_received():
    """Lesson 55: a preempted request is next, whoever else would need no computing."""
    pair = EchoPair(d_num_blocks=12, settings={"max_batched_tokens": 4, "max_num_seqs": 4})
    requests = [
        make_handoff(name, make_prompt(17, family=at), max_tokens=20)
        for at, name in enumerate("abc")
    ]
    for request in requests:
        pair.decode.add(request)
    pair.run("a", "b", "c")
    pair.drain()

    assert pair.decode.core.stats().num_preemptions > 0
    for request in requests:
        assert pair.decode.outputs[request.request_id] == expected(request)
    pair.decode.check_idle()


def test_p_takes_on_no_more_than_its_limit():
    """Lesson 57: of six at once, two are computed there at any time."""
    pair = EchoPair(config=HandoffConfig(max_inflight=2))
    requests = [make_handoff(f"r{at}", make_prompt(9 + at, family=at % 3)) for at in range(6)]
    for request in requests:
        pair.decode.add(request)
    most = 0
    while any(request.request_id not in pair.decode.reasons for request in requests):
        pair.turn()
        pair.clock.advance(0.01)
        most = max(most, pair.prefill.exchange.prefills.num_active)

    assert most == 2
    for request in requests:
        assert pair.decode.outputs[request.request_id] == expected(request)


def test_d_keeps_room_for_what_runs():
    """Lesson 33: an ask that would leave no room for growth waits, and is refused in the end."""
    pair = EchoPair(
        d_num_blocks=10,
        settings={"expected_output_tokens": 30},
        config=HandoffConfig(resend_s=0.5),
    )
    runner = make_echo_request("run", make_prompt(4, family=2), max_tokens=30)
    pair.decode.add(runner)
    pair.turn()
    pair.decode.add(make_handoff("a", make_prompt(17), computes_here=False))
    for _ in range(6):  # room for its five blocks, but not for the growth of what runs
        pair.turn()
    waiting = pair.decode.scheduler.stats().num_waiting
    for _ in range(3):
        pair.clock.advance(4.0)
        pair.turn()
    pair.run("run", "a")

    assert waiting == 1
    assert pair.decode.outputs["run"] == expected(runner)
    assert pair.decode.core.stats().num_preemptions == 0


def test_a_sequence_that_receives_has_its_slots_and_nothing_findable():
    """What D reserves is held: neither free nor found, and counted as running."""
    pair = EchoPair()
    request = make_handoff("a", PROMPT)
    pair.decode.add(request)
    until(pair, lambda: len(pair.fabric.transfers) > 0, blocks=False)
    pool = pair.decode.cache.stats().device

    assert (pool.held, pool.cached) == (8, 0)
    assert pair.decode.core.stats().num_running == 1
    (sequence,) = pair.decode.scheduler._roster.receiving
    assert sequence.state is SequenceState.RECEIVING


@pytest.mark.parametrize("message", [Renew(5, 1.0), Ask(5), Accepted(5, 1.0)])
def test_p_hears_that_d_knows_nothing_of_its_hand_off(message):
    """Lesson 53: whatever P says of a hand-off that is over is answered with how it ended."""
    pair = EchoPair()
    run(pair, make_handoff("a", PROMPT))
    pair.decode.exchange.decodes.receive("p", message, 0.0)

    assert pair.fabric.packets[-1].message == Cancel(5, Reason.GONE)


def test_a_first_token_that_is_repeated_is_answered_with_done():
    """Lesson 51: D has committed it, and says so as often as it is asked."""
    pair = EchoPair()
    pair.decode.add(make_handoff("a", PROMPT))
    seen: list[Done] = []
    for _ in range(60):
        seen += [p.message for p in pair.fabric.packets if isinstance(p.message, Done)]
        pair.fabric.packets = [
            p for p in pair.fabric.packets if not isinstance(p.message, Done)
        ]
        pair.turn()
        pair.clock.advance(0.1)

    assert len(seen) > 1
    assert len(set(seen)) == 1
