"""Two echo engines that hand off: helpers to serve requests and to wait for a state."""

from dataclasses import replace

from headwater.cache import TokenPath
from headwater.scheduler.request import Request
from headwater.testing.peers import EchoPair, EchoPeer
from headwater.testing.tiers import uncached_tokens


def expected(request: Request) -> list[int]:
    """The output of the request on one instance without a cache."""
    return uncached_tokens(replace(request, prefill=""))


def run(pair: EchoPair, *requests: Request) -> None:
    """Serve the requests one after the other, and check the tokens of each."""
    for request in requests:
        pair.decode.add(request)
        pair.run(request.request_id)
        assert pair.decode.outputs[request.request_id] == expected(request)


def matched(peer: EchoPeer, tokens: list[int]) -> int:
    """Blocks of `tokens` that are findable on `peer`."""
    return peer.cache.match(TokenPath(tokens)).device_blocks


def lease_end_s(peer: EchoPeer, handoff: int) -> float | None:
    """When the lease of a hand-off ends on `peer` unless it is renewed; None without one."""
    entry = peer.handoffs.decode_side._entries.get(handoff)
    return None if entry is None else entry.machine.lease_end_s


def until(pair: EchoPair, done: object, **held: bool) -> None:
    """Run turns of both instances until `done()`; blocks or fences may be held."""
    for _ in range(200):
        if done():  # type: ignore[operator]
            return
        pair.turn(**held)
        pair.clock.advance(0.01)
    raise AssertionError("the condition did not hold within 200 turns")
