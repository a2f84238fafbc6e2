"""The phases of a hand-off, on a clock that the test moves."""

import pytest

from headwater.disagg.protocol.messages import First, Grant
from headwater.testing.peers import EchoPair
from tests.disagg.requests import make_handoff, make_prompt

PROMPT = make_prompt(30)
STEP_S = 0.01


def parts_of(pair):
    return pair.decode.handoffs.decode_side.totals.seconds


def test_a_grant_that_comes_while_p_computes_costs_nothing():
    """Asking that is hidden by computing does not count; the time that P waits counts."""
    hidden = EchoPair()
    hidden.decode.add(make_handoff("a", PROMPT))
    hidden.run("a", step_s=STEP_S)
    late = EchoPair()
    late.decode.add(make_handoff("a", PROMPT))
    while not any(isinstance(packet.message, Grant) for packet in late.fabric.packets):
        late.turn()
        late.clock.advance(STEP_S)
    for _ in range(50):
        late.prefill.step()
        late.clock.advance(STEP_S)
    late.run("a", step_s=STEP_S)

    assert parts_of(hidden)["ask"] <= 2 * STEP_S
    assert parts_of(late)["ask"] >= 40 * STEP_S


def test_the_parts_of_a_hand_off_take_no_longer_than_the_whole():
    """Nothing is counted twice, and the rest is small: messages in transit."""
    pair = EchoPair()
    pair.decode.add(make_handoff("a", PROMPT))
    pair.run("a", step_s=STEP_S)
    parts = dict(parts_of(pair))
    whole = parts.pop("first_token")

    assert set(parts) == {"start", "queue", "compute", "ask", "push"}
    assert sum(parts.values()) == pytest.approx(whole, abs=3 * STEP_S)


def test_a_fence_that_holds_at_once_is_not_a_step_late():
    """D delivers in the turn in which the last awaited event arrives."""
    pair = EchoPair()
    pair.fabric.holds_at_once = True
    pair.decode.add(make_handoff("a", PROMPT))
    while not any(isinstance(packet.message, First) for packet in pair.fabric.packets):
        pair.turn()
    pair.turn()

    assert pair.decode.outputs["a"]
