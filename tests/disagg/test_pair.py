"""A prefill and a decode instance: the same tokens as one instance alone, and no slot lost."""

import pytest

from headwater.testing.peers import EchoPair
from headwater.testing.tiers import uncached_tokens
from tests.disagg.requests import make_handoff, make_prompt


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 16, 30, 33])
@pytest.mark.parametrize("depth", [1, 2])
def test_disaggregated_equals_local(num_tokens, depth):
    """The tokens are equal, whether the prompt ends with a block, inside one, or is shorter
    than one."""
    pair = EchoPair(depth=depth)
    request = make_handoff("a", make_prompt(num_tokens))

    pair.decode.add(request)
    pair.run("a")
    pair.drain()

    assert pair.decode.outputs["a"] == uncached_tokens(request)
    assert pair.decode.runner.num_tokens == 5  # its output, and nothing of the prompt
    assert pair.decode.handoffs.decode_side.totals.num_done == 1
    assert pair.prefill.handoffs.prefill_side.totals.num_done == 1
    for peer in pair.peers:
        peer.check_idle()
