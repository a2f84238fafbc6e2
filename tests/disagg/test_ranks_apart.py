"""Hand-offs between instances of different tensor-parallel sizes: whole blocks travel."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.disagg.real import TOKEN, RealPair

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer token, which both instances share."""
    monkeypatch.setenv("HEADWATER_PEER_TOKEN", TOKEN)


def _converse(link: str, model: Path | None = None, **sizes: Any) -> None:
    name = None if model is None else str(model)
    with (
        RealPair(link, model=name, **sizes) as pair,
        RealPair(link, model=name, prefix_caching=False) as plain,
    ):
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


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    ("link", "sizes"),
    [
        ("tcp", {"prefill": {"tensor_parallel_size": 4}}),
        ("shm", {"tiers": {"tensor_parallel_size": 2}}),
    ],
)
def test_models_with_experts_and_with_latent_kv_are_handed_off(
    family: str, link: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Four ranks prefill for one, and one for two."""
    from tests.device.families import save_family

    _converse(link, save_family(family, tmp_path, vocab_size=512), **sizes)
