"""State machines: leases that the link closed by itself, and deadlines while a fence is
awaited."""

import pytest

from headwater.cache import JobStatus, LoadJob
from headwater.clock import SystemClock
from headwater.disagg.protocol.actions import LocalFallback, Send
from headwater.disagg.protocol.config import HandoffConfig
from headwater.disagg.protocol.decode import DecodeHandoff, DecodeState
from headwater.disagg.protocol.messages import (
    Accepted,
    Ask,
    Cancel,
    First,
    Reason,
    Start,
    Timings,
)
from headwater.disagg.protocol.peer_read import PeerRead
from headwater.launch import peers
from headwater.scheduler.request import Usage
from headwater.transfer.completions import JobCompletion
from tests.disagg.real import TOKEN, RealPair, make_real_request
from tests.disagg.requests import make_handoff, make_prompt

BLOCK_BYTES = 32


def make_receiving(config: HandoffConfig) -> DecodeHandoff:
    """A hand-off that waits for four blocks, at time 0."""
    start = Start(
        handoff=1,
        request=make_handoff("a", make_prompt(16)),
        link="held://d",
        num_found=0,
        within_s=60.0,
    )
    machine = DecodeHandoff(start, config, block_bytes=BLOCK_BYTES, local_fallback=True)
    machine.begin(0.0)
    machine.receive(Accepted(1, 0.0), 0.0)
    machine.receive(Ask(1), 0.0)
    machine.reserved(0, range(4), 0.0)
    return machine


def make_first(num_blocks: int) -> First:
    """The first token of the hand-off of `make_receiving`, after this many blocks."""
    usage = Usage(
        prompt_tokens=16,
        cached_tokens=0,
        by_tier={},
        computed=16,
        miss_reason=None,
        queued_s=0.0,
    )
    return First(
        handoff=1,
        token=7,
        logprobs=None,
        usage=usage,
        num_blocks=num_blocks,
        num_bytes=num_blocks * BLOCK_BYTES,
        timings=Timings(),
    )


def test_d_computes_from_the_first_block_that_was_not_kept():
    """P assumes success, so D reports the failure to P (lesson 53)."""
    machine = make_receiving(HandoffConfig())
    for index in (0, 1, 3):
        machine.block_received(index, BLOCK_BYTES, 0.0)
    actions = machine.lease_closed(3 * BLOCK_BYTES, frozenset({0, 1, 3}), 0.0)

    assert actions == [Send(Cancel(1, Reason.BYTE_COUNT)), LocalFallback(2, Reason.BYTE_COUNT)]
    assert machine.is_released


def test_a_failing_hand_off_sleeps_until_its_fence_has_ended():
    """The lease of the hand-off has expired, and that deadline is not waited for again (lesson
    78)."""
    config = HandoffConfig()
    machine = make_receiving(config)
    expired_s = config.term_s + 0.5
    machine.tick(expired_s)

    assert machine.state is DecodeState.FAILING
    assert machine.wake_s == expired_s + config.fence_wait_s


def test_a_closing_hand_off_sleeps_until_its_fence_has_ended():
    """All blocks have arrived; no other deadline makes the loop turn (lesson 78)."""
    config = HandoffConfig()
    machine = make_receiving(config)
    for index in range(4):
        machine.block_received(index, BLOCK_BYTES, 1.0)
    machine.receive(make_first(num_blocks=4), 1.0)

    assert machine.state is DecodeState.CLOSING
    assert machine.wake_s == 1.0 + config.fence_wait_s


def test_p_computes_blocks_that_it_read_and_could_not_keep():
    """P computes such blocks at once: waiting for a fence would hold its slots for ever."""
    read = PeerRead(1, 4, HandoffConfig(), block_bytes=BLOCK_BYTES)
    read.begin()
    read.reserved(0, range(4), "held://p", 0.0)
    read.announced(4, 0.0)
    read.block_received(0, BLOCK_BYTES, 0.0)

    assert read.lease_closed(frozenset({0})) == [LocalFallback(1, Reason.GONE)]
    assert read.is_released


class OneFails:
    """A `DeviceCopier` whose third copy to the device fails."""

    def __init__(self, copier) -> None:
        self._copier = copier
        self._num_loads = 0

    def start(self, transfer, report) -> None:
        self._num_loads += isinstance(transfer, LoadJob)
        if self._num_loads == 3:
            report(JobCompletion(transfer.job, JobStatus.FAILED))
        else:
            self._copier.start(transfer, report)

    def close(self) -> None:
        self._copier.close()


@pytest.mark.slow
def test_a_copy_that_fails_costs_the_client_nothing_but_time(monkeypatch):
    """With the tiny model and staging, the client gets its tokens long before the hand-off
    times out."""
    pytest.importorskip("torch")
    from headwater.device import open as device

    open_copier = device.open_copier
    monkeypatch.setattr(
        device, "open_copier", lambda *args, **how: OneFails(open_copier(*args, **how))
    )
    monkeypatch.setattr(peers, "_in_place", peers._staged)
    monkeypatch.setenv("HEADWATER_PEER_TOKEN", TOKEN)
    tokens = [at * 37 % 256 for at in range(100)]
    with RealPair() as pair:
        began_s = SystemClock().now()
        there = pair.serve(make_real_request("there", tokens))
        took_s = SystemClock().now() - began_s
        here = pair.serve(make_real_request("here", tokens), handed_off=False)
        pair.settle()
        failures = pair.decode.stats().handoffs["decode"].failures

    assert there == here
    assert failures == {Reason.BYTE_COUNT: 1}
    assert took_s < HandoffConfig().handoff_timeout_s / 10
