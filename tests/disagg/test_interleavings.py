"""Any order of messages, blocks, fences, deaths and time: no wrong token, no lost slot, every
request ends.

Whole engines on a virtual clock, joined by a fabric. The search chooses what arrives next, twice,
late or never. Lessons 46, 50 to 54, 56, 58.
"""

from dataclasses import replace

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.strategies import booleans, data, integers, sampled_from

from headwater.disagg.protocol.config import HandoffConfig
from headwater.scheduler.request import Request
from headwater.testing.peers import EchoPair, EchoPeer
from headwater.testing.tiers import make_echo_request, uncached_tokens
from headwater.types import RequestId
from tests.disagg.pairs import lease_end_s
from tests.disagg.requests import make_handoff, make_prompt, make_storage
from tests.search import search

CONFIG = HandoffConfig(
    handoff_timeout_s=30.0, max_inflight=3, pull_min_blocks=1, return_after_s=2.0
)
BOUND_S = 90.0
"""Every request has ended this long after the fabric works again."""


class Interleavings(RuleBasedStateMachine):
    """Two instances and every event between them."""

    @initialize(
        depth=sampled_from((1, 2)),
        p_blocks=integers(8, 20),
        d_blocks=integers(8, 20),
        tiers=sampled_from(("device", "host", "storage")),
        load_policy=sampled_from(("priced", "wait", "best_effort")),
    )
    def start(self, depth, p_blocks, d_blocks, tiers, load_policy):
        limits = {"max_batched_tokens": 8, "max_num_seqs": 4, "load_policy": load_policy}
        self.pair = EchoPair(
            p_num_blocks=p_blocks,
            d_num_blocks=d_blocks,
            host_blocks=0 if tiers == "device" else 24,
            storage=make_storage() if tiers == "storage" else None,
            depth=depth,
            config=CONFIG,
            settings=limits,
        )
        self.dead: set[str] = set()
        self.requests: dict[str, Request] = {}
        self.owners: dict[str, str] = {}
        self.ended: dict[str, list[int]] = {}
        self.broken: dict[str, tuple[Request, list[int]]] = {}
        """Requests that ended before their last token, and the tokens they had."""
        self.number = 0

    @rule(
        num=integers(1, 26),
        family=integers(0, 1),
        out=integers(1, 12),
        here=booleans(),
        back=booleans(),
    )
    def hand_off(self, num, family, out, here, back):
        """A prompt for P, of two families that share prefixes; some requests may be returned."""
        tokens, out = make_prompt(num, family=family), min(out, 32 - num)
        request = make_handoff(self._name(), tokens, max_tokens=out, local_fallback=here)
        self._add("d", replace(request, can_return=back))

    @rule(data=data(), handed_off=booleans())
    def take_up(self, data, handed_off):
        """A request that was returned, or lost with its instance, continues after its last
        token."""
        if self.broken:
            name = data.draw(sampled_from(sorted(self.broken)))
            request, sent = self.broken.pop(name)
            if request.num_resumed_tokens + len(sent) == request.params.max_tokens:
                return  # only the report of its end was lost
            tokens = np.concatenate((request.tokens, np.array(sent, dtype=np.int32)))
            again = replace(
                request,
                request_id=RequestId(self._name()),
                tokens=tokens,
                prefill="p" if handed_off else "",
                num_resumed_tokens=request.num_resumed_tokens + len(sent),
            )
            self._add("d", again)

    @rule(data=data(), more=integers(1, 5), out=integers(1, 4))
    def next_turn(self, data, more, out):
        """A prompt that continues an answer."""
        known = [name for name in self.ended if self.ended[name]]
        if known:
            name = data.draw(sampled_from(known))
            tokens = self.requests[name].tokens.tolist() + self.ended[name]
            tokens = (tokens + make_prompt(more))[:28]
            self._add("d", make_handoff(self._name(), tokens, max_tokens=out))

    @rule(num=integers(1, 20), out=integers(1, 5), where=sampled_from("pd"))
    def compute_alone(self, num, out, where):
        """A request that one instance serves by itself."""
        self._add(where, make_echo_request(self._name(), make_prompt(num), max_tokens=out))

    @rule(out=integers(8, 14), turns=integers(2, 10), seconds=sampled_from((0.0, 2.5)))
    def crowd(self, out, turns, seconds):
        """D decodes more than it has room for, for a short or a long time."""
        for family in (1, 2, 3):
            request = make_echo_request(
                self._name(), make_prompt(14, family=family), max_tokens=out
            )
            self._add("d", replace(request, can_return=True))
        self.flow(turns, blocks=True, fences=True)
        self.wait(seconds)

    @rule(data=data())
    def miscount(self, data):
        """The byte count of a link is wrong by one byte."""
        leases = [
            lease
            for leases in self.pair.fabric._leases.values()
            for lease in leases.values()
            if lease.received
        ]
        if leases:
            received = data.draw(sampled_from(leases)).received
            received[data.draw(sampled_from(sorted(received)))] -= 1

    @rule(name=sampled_from("pd"), times=integers(1, 4))
    def step(self, name, times):
        """Turn one loop."""
        for _ in range(times):
            if name not in self.dead:
                self._peer(name).step()
        self._check_leases(name)
        self._note()

    @rule(turns=integers(1, 8), blocks=booleans(), fences=booleans())
    def flow(self, turns, blocks, fences):
        """Everything works for a while; blocks or fences may be held."""
        for _ in range(turns):
            if not self.dead:
                self.pair.turn(blocks=blocks, fences=fences)
                self.pair.clock.advance(0.05)
        self._note()

    @rule(data=data(), again=booleans())
    def deliver(self, data, again):
        """Deliver any message, in any order; some are delivered again later."""
        if self.pair.fabric.packets:
            packet = data.draw(sampled_from(self.pair.fabric.packets))
            self.pair.fabric.deliver(packet, again=again)

    @rule(data=data())
    def drop(self, data):
        """A message is lost."""
        if self.pair.fabric.packets:
            self.pair.fabric.drop(data.draw(sampled_from(self.pair.fabric.packets)))

    @rule(data=data(), times=integers(1, 8))
    def move(self, data, times):
        """Move blocks, one by one."""
        fabric = self.pair.fabric
        for _ in range(times):
            if fabric.transfers:
                fabric.move(data.draw(sampled_from(fabric.transfers)))

    @rule(data=data())
    def repeat(self, data):
        """Blocks of a push that have arrived are sent once more."""
        fabric = self.pair.fabric
        if fabric.transfers:
            fabric.repeat(data.draw(sampled_from(fabric.transfers)))

    @rule(data=data(), vanishes=booleans())
    def break_push(self, data, vanishes):
        """A push fails; its blocks in flight arrive late, or never."""
        fabric = self.pair.fabric
        if fabric.transfers:
            transfer = data.draw(sampled_from(fabric.transfers))
            fabric.fail(transfer)
            if vanishes:
                fabric.vanish(transfer)

    @rule(data=data())
    def settle_fence(self, data):
        """A fence ends, and its lease is closed."""
        if self.pair.fabric.fences:
            self.pair.fabric.settle_fence(data.draw(sampled_from(self.pair.fabric.fences)))

    @rule(seconds=sampled_from((0.3, 1.0, 2.5, 9.5, 31.0)))
    def wait(self, seconds):
        """Time passes, for both."""
        self.pair.clock.advance(seconds)
        self.pair.fabric.expire(self.pair.clock.now())

    @rule(data=data())
    def abort(self, data):
        """A client disconnects."""
        alive = [name for name in self.requests if name not in self.ended]
        if alive and "d" not in self.dead:
            self.pair.decode.core.abort(
                self.requests[data.draw(sampled_from(alive))].request_id
            )

    @rule(name=sampled_from("pd"), what=sampled_from(("crash", "restart", "reset", "cut")))
    def trouble(self, name, what):
        """An instance dies, restarts empty, or resets its cache; connections end."""
        if name in self.dead:
            self._restart(name)
        elif what == "crash":
            self._crash(name)
        elif what == "reset":
            self._peer(name).core.reset_cache()
        elif what == "cut":
            for connection in self.pair.fabric.connections():
                self.pair.fabric.cut(connection)

    @invariant()
    def books_balance(self):
        """The invariants hold after every event."""
        for name in "pd":
            if name not in self.dead:
                self._peer(name).core.check()

    @invariant()
    def pushes_end_before_the_lease(self):
        """Lesson 50: P's term is never longer than D's."""
        if "d" in self.dead:
            return
        for transfer in self.pair.fabric.transfers:
            end_s = lease_end_s(self.pair.decode, transfer.push.lease)
            if end_s is not None and not transfer.is_late:
                assert transfer.deadline_s <= end_s

    def teardown(self):
        if not hasattr(self, "pair"):
            return
        for name in sorted(self.dead):
            self._restart(name)
        end_s = self.pair.clock.now() + BOUND_S
        while self.pair.clock.now() < end_s:
            self.pair.turn()
            self.pair.fabric.expire(self.pair.clock.now())
            self.pair.clock.advance(0.25)
            self._note()
        assert set(self.requests) == set(self.ended), "a request is stuck"
        for peer in self.pair.peers:
            peer.check_idle()

    def _name(self) -> str:
        self.number += 1
        return f"r{self.number}"

    def _peer(self, name: str) -> EchoPeer:
        return self.pair.prefill if name == "p" else self.pair.decode

    def _add(self, name: str, request: Request) -> None:
        if name not in self.dead and len(self.requests) - len(self.ended) < 6:
            self.owners[request.request_id] = name
            self.requests[request.request_id] = request
            self._peer(name).add(request)

    def _crash(self, name: str) -> None:
        """The requests of a crashed instance end with it."""
        self.dead.add(name)
        self.pair.fabric.crash(name)
        for request in list(self.requests):
            if request not in self.ended and self.owners[request] == name:
                tokens = self._peer(name).outputs.get(request, [])
                self._check_tokens(request, tokens)
                self.broken[request] = self.requests[request], tokens
                self.ended[request] = []

    def _restart(self, name: str) -> None:
        self.dead.discard(name)
        fresh = self.pair.make(name)
        if name == "p":
            self.pair.prefill = fresh
        else:
            self.pair.decode = fresh

    def _note(self) -> None:
        """Check the tokens of requests that have ended."""
        for peer in self.pair.peers:
            if peer.name in self.dead:
                continue
            for name, reason in peer.reasons.items():
                if name in self.ended or self.owners[name] != peer.name:
                    continue
                tokens = peer.outputs[name]
                self._check_tokens(name, tokens)
                request = self.requests[name]
                if reason == "length":
                    assert len(tokens) == request.params.max_tokens - request.num_resumed_tokens
                else:
                    assert reason in ("abort", "refused", "returned")
                if reason == "returned":
                    assert request.can_return
                    self.broken[name] = request, tokens
                self.ended[name] = tokens

    def _check_leases(self, name: str) -> None:
        """Lesson 50: no lease outlives its term, once D has looked at the clock."""
        works = {} if name in self.dead else self._peer(name).handoffs.decode_side._entries
        for work in works.values():
            end_s = work.machine.lease_end_s
            assert end_s is None or end_s > self.pair.clock.now()

    def _check_tokens(self, name: str, tokens: list[int]) -> None:
        request = replace(self.requests[name], prefill="")
        assert tokens == uncached_tokens(request)[: len(tokens)]


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = search(examples=150, steps=60)
