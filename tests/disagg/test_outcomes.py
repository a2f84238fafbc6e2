"""Each hand-off has one outcome on both sides; a slow peer delays no other request."""

import pytest

from headwater.disagg.protocol.messages import Accepted, Ask, Cancel, HandoffDone, Reason, Renew
from headwater.testing.peers import EchoPair
from headwater.testing.tiers import make_echo_request
from tests.disagg.pairs import expected, run, until
from tests.disagg.requests import make_handoff, make_prompt

PROMPT = make_prompt(30)


def test_one_unresponsive_d_blocks_no_other():
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
    """Lesson 52: P is connected and silent. The first request waits for a term, the next ones
    are computed at once, and when P answers again they are handed off again."""
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
    assert pair.decode.handoffs.decode_side.totals.num_done == 1
    pair.drain()
    for peer in pair.peers:
        peer.check_idle()


def test_a_failed_push_is_reported_at_once():
    """Lesson 53: P tells D, which computes the missing blocks without waiting for a timeout."""
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
    assert pair.decode.usages["a"].cached_tokens == 5 * 4  # complete blocks were kept
    assert pair.decode.handoffs.decode_side.totals.failures == {Reason.PUSH: 1}
    assert pair.prefill.handoffs.prefill_side.totals.failures == {Reason.PUSH: 1}


@pytest.mark.parametrize("when", range(8))
def test_an_abort_is_sent_to_p_at_once_and_returns_every_slot(when):
    """Lessons 53 and 58: P is told and slots are returned at any step of the hand-off."""
    pair = EchoPair()
    request = make_handoff("a", PROMPT)
    pair.decode.add(request)
    for _ in range(when):
        pair.turn(blocks=when % 2 == 0)
    pair.decode.core.abort(request.request_id)
    pair.run("a")
    pair.drain(within_s=3.0)

    assert pair.decode.reasons["a"] == "abort"
    assert pair.prefill.handoffs.prefill_side.num_active == 0
    for peer in pair.peers:
        peer.check_idle()


def test_a_block_that_arrived_short_is_not_ready():
    """Lesson 54: bytes are counted; blocks that are not exact are computed."""
    pair = EchoPair()
    request = make_handoff("a", PROMPT)
    pair.decode.add(request)
    until(pair, lambda: len(pair.fabric.transfers) > 0, blocks=False)
    (transfer,) = pair.fabric.transfers
    lease = pair.fabric._leases[transfer.target][transfer.push.lease]
    while transfer in pair.fabric.transfers:
        pair.fabric.move(transfer)
    lease.received[3] = 31  # the link's final count: one byte less than was sent
    pair.run("a")

    assert pair.decode.handoffs.decode_side.totals.failures == {Reason.BYTE_COUNT: 1}
    assert pair.decode.outputs["a"] == expected(request)


@pytest.mark.parametrize("message", [Renew(5, 1.0), Ask(5), Accepted(5, 1.0)])
def test_p_learns_that_d_does_not_know_the_hand_off(message):
    """Lesson 53: each message of P about a hand-off that is over is answered with its outcome."""
    pair = EchoPair()
    run(pair, make_handoff("a", PROMPT))
    pair.decode.handoffs.decode_side.receive("p", 1, message, 0.0)

    assert pair.fabric.packets[-1].message == Cancel(5, Reason.GONE)


def test_a_first_token_that_is_repeated_is_answered_with_done():
    """Lesson 51: D has committed the token already, so D only repeats Done."""
    pair = EchoPair()
    pair.decode.add(make_handoff("a", PROMPT))
    seen: list[HandoffDone] = []
    for _ in range(60):
        seen += [p.message for p in pair.fabric.packets if isinstance(p.message, HandoffDone)]
        pair.fabric.packets = [
            p for p in pair.fabric.packets if not isinstance(p.message, HandoffDone)
        ]
        pair.turn()
        pair.clock.advance(0.1)

    assert len(seen) > 1
    assert len(set(seen)) == 1


def test_a_late_report_of_a_lost_connection_ends_nothing_on_the_next_one():
    """The report waits in D's inbox while another hand-off starts on a new connection."""
    pair = EchoPair()
    first, second = make_handoff("a", PROMPT), make_handoff("b", make_prompt(22, family=2))
    pair.decode.add(first)
    pair.turn()
    (connection,) = pair.fabric.connections()
    pair.fabric.cut(connection)
    pair.decode.add(second)
    pair.run("a", "b")

    assert pair.decode.outputs["a"] == expected(first)
    assert pair.decode.outputs["b"] == expected(second)
    assert pair.decode.handoffs.decode_side.totals.failures == {Reason.LOST: 1}
    assert pair.decode.handoffs.decode_side.totals.num_done == 1
