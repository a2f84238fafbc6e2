"""Ways to peers: one for each place, not more than a peer needs, and gone with it."""

import pytest

from headwater.disagg.ways import Ways
from headwater.errors import ConfigError


class Sender:
    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def made() -> dict[str, Sender]:
    """Every sender that was made, by its address."""
    return {}


@pytest.fixture
def ways(made: dict[str, Sender]) -> Ways:
    return Ways(lambda address: made.setdefault(address, Sender()))  # type: ignore[arg-type,return-value] # only closed


def test_a_way_is_made_once(ways, made):
    """Whoever pushes again uses the one there is."""
    assert ways.to("d", "tcp://a") is ways.to("d", "tcp://a")
    assert ways.to("d", "tcp://b") is not ways.to("d", "tcp://a")
    assert len(made) == 2


def test_a_peer_does_not_make_us_open_as_many_as_it_likes(ways):
    """Each may take memory; a peer receives in one place (lesson 66)."""
    for number in range(4):
        ways.to("d", f"tcp://{number}")

    with pytest.raises(ConfigError, match="more than 4 places"):
        ways.to("d", "tcp://5")
    assert ways.to("d", "tcp://3")
    assert ways.to("another", "tcp://5")


def test_ways_end_with_their_peer(ways, made):
    """And are made anew should it return."""
    ways.to("d", "tcp://a")
    ways.to("e", "tcp://e")
    ways.close("d")
    ways.close("d")

    assert (made["tcp://a"].num_closed, made["tcp://e"].num_closed) == (1, 0)
    ways.close_all()
    assert made["tcp://e"].num_closed == 1
