"""Hand-offs between instances of different tensor-parallel sizes: whole blocks travel."""

import random
from typing import Any

import pytest

from tests.disagg.real import TOKEN, RealPair

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both instances share it."""
    monkeypatch.setenv("HEADWATER_PEER_TOKEN", TOKEN)


def _converse(link: str, **sizes: Any) -> None:
    with RealPair(link, **sizes) as pair, RealPair(link, prefix_caching=False) as plain:
        pair.converse(plain, random.Random(link))
        handoffs = pair.decode.stats().handoffs["decode"]

    assert handoffs.done == 9
    assert not handoffs.failures


@pytest.mark.slow
def test_two_ranks_prefill_for_one() -> None:
    """Each rank copies its KV heads to shared buffers, which the decode instance maps."""
    _converse("shm", prefill={"tensor_parallel_size": 2})


@pytest.mark.nightly
@pytest.mark.parametrize("link", ["tcp", "shm"])
@pytest.mark.parametrize("size", [2, 4])
def test_one_rank_prefills_for_several(link: str, size: int) -> None:
    """Each rank takes its KV heads out of the blocks that arrive."""
    _converse(link, tiers={"tensor_parallel_size": size})
