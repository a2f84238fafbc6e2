"""Leases: how long slots are kept for a peer, and when they are freed."""

from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.messages import Ask, Failed, Grant, Reason
from headwater.testing.peers import EchoPair
from headwater.testing.tiers import make_echo_request
from tests.disagg.pairs import expected, lease_end_s, until
from tests.disagg.requests import make_handoff, make_prompt

PROMPT = make_prompt(30)


def test_an_expired_lease_is_freed_once_and_only_when_it_is_closed():
    """Lesson 50: P is silent and its bytes are late; the slots stay quarantined until the lease
    is closed."""
    pair = EchoPair(num_blocks=10)
    request = make_handoff("a", PROMPT)
    pair.decode.add(request)
    until(pair, lambda: len(pair.fabric.transfers) > 0, blocks=False)
    pair.fabric.packets.clear()
    for _ in range(30):  # D alone: no heartbeat arrives any more
        pair.clock.advance(0.5)
        pair.decode.step()
        pair.fabric.packets.clear()
    assert pair.decode.handoffs.decode_side.totals.failures[Reason.EXPIRED] == 1
    assert pair.decode.cache.stats().device.held == 8
    for transfer in list(pair.fabric.transfers):  # arrives although the lease is over
        while transfer in pair.fabric.transfers:
            pair.fabric.move(transfer)
    pair.run("a")
    pair.drain()

    assert pair.decode.outputs["a"] == expected(request)
    pair.decode.check_idle()


def test_p_stops_pushing_before_its_term_ends():
    """Lesson 50: without confirmed heartbeats P gives up first."""
    pair = EchoPair()
    pair.decode.add(make_handoff("a", PROMPT))
    until(pair, lambda: len(pair.fabric.transfers) > 0, blocks=False)
    end_s = lease_end_s(pair.decode, pair.fabric.transfers[0].push.lease)
    assert end_s is not None
    while pair.prefill.handoffs.prefill_side.num_active:
        pair.fabric.packets.clear()
        pair.clock.advance(0.1)
        pair.prefill.step()

    assert pair.clock.now() < end_s
    pair.fabric.expire(pair.clock.now())
    pair.prefill.step()
    assert pair.prefill.handoffs.prefill_side.totals.failures[Reason.EXPIRED] == 1


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

    assert pair.decode.handoffs.decode_side.totals.num_done == 1


def test_repeated_asks_get_the_same_answer_and_take_nothing_more():
    """Lesson 51: each answer names the same lease and the same slots."""
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
    assert pair.decode.handoffs.decode_side.totals.num_asks == 1


def test_a_restarted_peer_gets_no_messages_for_its_predecessor():
    """Lesson 51: messages to a dead instance are not delivered to its successor."""
    pair = EchoPair()
    pair.decode.add(make_handoff("a", PROMPT))
    assert pair.fabric.packets
    pair.fabric.crash("p")
    pair.prefill = pair.make("p")
    pair.run("a")

    assert pair.prefill.handoffs.prefill_side.totals.num_asks == 0
    assert pair.decode.outputs["a"] == expected(make_handoff("a", PROMPT))


def test_a_late_grant_is_returned():
    """Lesson 51: P has given up when the Grant arrives; D is told and frees the slots."""
    pair = EchoPair()
    pair.decode.add(make_handoff("a", PROMPT))
    is_granted = lambda: any(isinstance(p.message, Grant) for p in pair.fabric.packets)  # noqa: E731
    until(pair, is_granted)
    grant = next(p for p in pair.fabric.packets if isinstance(p.message, Grant))
    work = pair.prefill.handoffs.prefill_side
    work.lost(grant.connection.name_at("p"), pair.clock.now())
    pair.turn()
    told = [p.message for p in pair.fabric.packets]

    assert any(isinstance(message, Failed) for message in told)
    pair.run("a")
    pair.drain()
    pair.decode.check_idle()
    pair.prefill.check_idle()
