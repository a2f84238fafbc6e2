"""The published contract of a link, rule by rule, on both doubles and on every link."""

import pytest

from headwater.testing.link_contract import CHECKS, check_link, open_harness
from headwater.testing.links import LocalNetwork
from tests.disagg.held import Driver
from tests.disagg.wire import LINKS, MakeLinks

SIZES = (4096 * 3 + 40, 3 << 20)
"""Several blocks in a frame, with odd bytes at the end; and one frame for each block."""


@pytest.mark.parametrize("block_bytes", SIZES, ids=("small", "large"))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("link", LINKS)
def test_every_link_keeps_the_contract(link, check, block_bytes):
    """Real sockets and memory keep the order, one outcome per push, and fences (lesson 50)."""
    with open_harness(MakeLinks(link), link, block_bytes) as harness:
        check(harness)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_link_with_held_frames_keeps_the_contract(check):
    """The searches over interleavings use links that keep the contract (lesson 49)."""
    driver = Driver()
    with driver.running(), open_harness(driver.links, "held", 4096) as harness:
        check(harness)


def test_the_double_keeps_the_contract():
    """The local double keeps the contract as well (lesson 49)."""
    network = LocalNetwork()
    with network.pump():
        check_link(network.links, "local", block_bytes=4096)
