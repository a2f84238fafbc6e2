"""Senders to peers: one for each address, limited in number, closed with their connection."""

import pytest

from headwater.clock import SystemClock
from headwater.disagg.handoff.resources import SenderPool
from headwater.disagg.protocol.push import Push, PushFailure
from headwater.errors import ConfigError
from headwater.testing.links import BlockArray, EventLog, LocalNetwork
from tests.disagg.wire import pieces_of


@pytest.fixture
def log():
    return EventLog()


@pytest.fixture
def senders(log):
    return SenderPool(LocalNetwork().links(BlockArray(1, 64), log).connect)


def is_closed(sender, log, job):
    """Whether the sender is closed; otherwise the push would wait."""
    deadline_s = SystemClock().now() + 30.0
    sender.push(Push(job=job, lease=1, pieces=pieces_of([0], 64), deadline_s=deadline_s))
    return log.outcomes(job) == [(job, PushFailure.CLOSED)]


def test_a_sender_is_made_once(senders):
    """The next push to an address uses the same sender."""
    assert senders.get("d", "local://1") is senders.get("d", "local://1")
    assert senders.get("d", "local://2") is not senders.get("d", "local://1")
    assert senders.get("e", "local://1") is not senders.get("d", "local://1")


def test_the_senders_of_a_peer_are_limited(senders):
    """Each sender may take memory; a peer has one receiver (lesson 66)."""
    for number in range(4):
        senders.get("d", f"local://{number}")

    with pytest.raises(ConfigError, match="more than 4 link addresses"):
        senders.get("d", "local://5")
    assert senders.get("d", "local://3")
    assert senders.get("another", "local://5")


def test_senders_are_closed_with_their_peer(senders, log):
    """Senders are made again when the peer returns."""
    lost, kept = senders.get("d", "local://1"), senders.get("e", "local://1")
    senders.close("d")
    senders.close("d")

    assert is_closed(lost, log, 1)
    assert not is_closed(kept, log, 2)
    assert senders.get("d", "local://1") is not lost
    senders.close_all()
    assert is_closed(kept, log, 3)
