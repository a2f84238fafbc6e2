"""Prefill and decode on separate instances, both on a GPU, over each link."""

import random
from typing import Any

import pytest

from tests.device.gpu import pytestmark, require_gpu
from tests.disagg.real import BLOCK_TOKENS, TOKEN, RealPair, make_real_request

require_gpu()

__all__ = ["pytestmark"]

ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32", "swap_space_gib": 0.05}
"""A small host tier: the default one is half of the free main memory, for each of four engines."""


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer token, which both instances share."""
    monkeypatch.setenv("HEADWATER_PEER_TOKEN", TOKEN)


@pytest.mark.parametrize("link", ["tcp", "shm", "cuda"])
def test_disaggregated_equals_local_on_a_gpu(link: str) -> None:
    """Conversations give the same tokens in float32."""
    with (
        RealPair(link, **ON_GPU) as pair,
        RealPair(link, prefix_caching=False, **ON_GPU) as plain,
    ):
        pair.converse(plain, random.Random(link))
        handoffs = pair.decode.stats().handoffs["decode"]

    assert handoffs.done == 9
    assert not handoffs.failures


def test_the_second_turn_moves_only_what_is_new_on_a_gpu() -> None:
    """Bytes are counted: D has the first turn and its answer already (lesson 55)."""
    with RealPair(**ON_GPU) as pair:
        prompt = [(at * 37) % 256 for at in range(10 * BLOCK_TOKENS)]
        (answer,) = pair.serve(make_real_request("a", prompt, max_tokens=2 * BLOCK_TOKENS + 1))
        first = pair.decode.stats().handoffs["decode"].num_bytes
        pair.serve(make_real_request("b", prompt + answer + [5] * (BLOCK_TOKENS - 1)))
        both = pair.decode.stats().handoffs["decode"].num_bytes
        pair.settle()

    assert (both - first) * 10 == first
