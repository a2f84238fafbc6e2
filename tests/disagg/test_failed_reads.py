"""Peer reads that fail: P is told at once, computes, and does not read again for a while."""

from dataclasses import replace

from headwater.disagg.protocol.push import PushFailure
from headwater.testing.peers import EchoPair
from headwater.testing.tiers import make_echo_request, uncached_tokens
from tests.disagg.requests import make_handoff, make_prompt


def warm(pair: EchoPair, family: int) -> list[int]:
    """A prompt of which only D has the first eight blocks."""
    tokens = make_prompt(41, family=family)
    name = f"warm{family}"
    pair.decode.add(make_echo_request(name, tokens[:33], max_tokens=1))
    pair.run(name)
    return tokens


def serve(pair: EchoPair, name: str, tokens: list[int], *, fail_reads: bool) -> bool:
    """Serve a hand-off without letting time pass; return whether D began to send blocks to
    P."""
    request = make_handoff(name, tokens)
    pair.decode.add(request)
    was_read = False
    for _ in range(60):
        for transfer in list(pair.fabric.transfers):
            if transfer.source == "d":
                was_read = True
                if fail_reads:
                    pair.fabric.fail(transfer, PushFailure.UNREACHABLE)
                    pair.fabric.vanish(transfer)
        pair.turn()
    assert pair.decode.outputs[name] == uncached_tokens(replace(request, prefill=""))
    return was_read


def test_a_failed_read_is_reported_at_once():
    """No clock moves: P does not wait for its own timeout (lesson 53)."""
    pair = EchoPair()
    tokens = warm(pair, 0)

    assert serve(pair, "a", tokens, fail_reads=True)
    assert pair.prefill.runner.num_tokens == 41
    pair.drain()
    for peer in pair.peers:
        peer.check_idle()


def test_a_peer_whose_reads_fail_is_not_asked_for_a_while():
    """Each further failure doubles the pause; a read that succeeds ends it."""
    pair = EchoPair()
    prompts = [warm(pair, family) for family in range(5)]

    assert serve(pair, "a", prompts[0], fail_reads=True)
    assert not serve(pair, "b", prompts[1], fail_reads=True)
    pair.clock.advance(11.0)
    assert serve(pair, "c", prompts[2], fail_reads=True)
    pair.clock.advance(11.0)
    assert not serve(pair, "d", prompts[3], fail_reads=True)
    pair.clock.advance(11.0)
    assert serve(pair, "e", prompts[4], fail_reads=False)
    assert pair.prefill.handoffs.reads._pauses == {}
