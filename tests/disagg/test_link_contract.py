"""The published contract of a link, rule by rule, on the double and on every link there is."""

import pytest

from headwater.disagg.links import LinkConfig, Links
from headwater.testing.link_contract import CHECKS, open_rig
from headwater.testing.links import LocalNetwork

LINKS = ("tcp", "shm", pytest.param("mooncake", marks=pytest.mark.slow))
SIZES = (4096 * 3 + 40, 3 << 20)
"""Several blocks a frame, with odd bytes at the end; and a frame of its own for each block."""

CONFIG = LinkConfig(token=b"a token of tests", max_senders=8)


@pytest.mark.parametrize("block_bytes", SIZES, ids=("small", "large"))
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("link", LINKS)
def test_every_link_keeps_the_contract(link, check, block_bytes):
    """Order, one outcome a push, fences that hold, on real sockets and memory (lesson 50)."""
    if link == "mooncake":
        pytest.importorskip("mooncake.engine", exc_type=ImportError)
    with open_rig(lambda m, d: Links(CONFIG, m, d), link, block_bytes) as rig:
        check(rig)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_double_keeps_the_contract(check):
    """What is proved with the double holds for links (lesson 49)."""
    network = LocalNetwork()
    with network.pump(), open_rig(network.links, "local", 4096) as rig:
        check(rig)
