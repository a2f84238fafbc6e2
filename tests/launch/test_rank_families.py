"""Ranks give the tokens of one rank for dense models, models with experts and models with latent
KV: computed in chunks, preempted, and found in each tier and storage backend."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.device.builtin import ensure
from tests.device.families import save_family
from tests.launch.rank_families import KINDS, make_prompts, open_engine, say, say_alone
from tests.storage.conftest import MooncakeLender, MooncakeMaster, RedisServer

Model = Callable[[str], Path]
SIZES = [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
WHOLE = 40 + 56 + 48 + 32 + 56 + 48
"""Tokens of the prompts in blocks that a request may take from the cache."""


@pytest.fixture(scope="module")
def model(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The folder of a tiny model of a kind, made on first use."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_family(KINDS[kind], tmp_path_factory.mktemp(kind))
            shutil.copy(ensure() / "tokenizer.json", made[kind])
        return made[kind]

    return folder


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_rank_from_every_tier(
    kind: str, size: int, model: Model, tmp_path: Path
) -> None:
    """The pool does not hold all sequences, so some are preempted. Afterwards the prompts are
    found on the device, on the host and in files; one rank finds in the files what several
    wrote."""
    settings: dict[str, Any] = {
        "storage_backend": "file",
        "storage_config": {"path": str(tmp_path), "capacity_bytes": 64 << 20},
        "swap_space_gib": 0.05,
    }
    expected = say_alone(model(kind), 1)
    ranks = open_engine(
        model(kind), tensor_parallel_size=size, num_blocks_override=48, **settings
    )
    outputs, found = [], []
    for removed in ((), (), ("device",), ("device", "host")):
        if removed:
            ranks.core.reset_cache(removed)
        answered, by_tier = say(ranks, make_prompts(1))
        outputs.append(answered)
        found.append(by_tier)
    num_preempted = ranks.core.stats().num_preemptions
    ranks.core.close()
    alone = open_engine(model(kind), **settings)
    answered, read_by_one = say(alone, make_prompts(1))
    alone.core.close()

    assert [*outputs, answered] == [expected] * 5
    assert num_preempted > 0
    assert found[1]["device"] > 0
    assert found[2]["host"] == found[3]["storage"] == read_by_one["storage"] == WHOLE


@pytest.fixture(params=["redis", "mooncake"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of a storage backend whose blocks outlive each engine."""
    if request.param == "redis":
        redis = RedisServer(tmp_path)
        yield {"storage_backend": "redis", "storage_config": {"url": redis.url}}
        redis.stop()
        return
    master = MooncakeMaster()
    lender = MooncakeLender(master)
    settings = {"master": master.address, "segment_bytes": 0}
    yield {"storage_backend": "mooncake", "storage_config": settings}
    lender.stop()
    master.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_engines_of_one_two_and_four_ranks_share_a_store(
    kind: str, store: dict[str, Any], model: Model
) -> None:
    """Two ranks write what four and one read, and one and two read what four wrote."""
    expected = [say_alone(model(kind), seed) for seed in (1, 2)]
    read = {}
    for size in (2, 4, 1, 2):
        engine = open_engine(
            model(kind), tensor_parallel_size=size, swap_space_gib=0.02, **store
        )
        for seed in (1, 2):
            answered, found = say(engine, make_prompts(seed))
            assert answered == expected[seed - 1], (size, seed)
            read[size, seed] = found.get("storage", 0)
            if size == 2 and not read[2, 1]:
                break  # the first engine leaves the second set of prompts to four ranks
        engine.core.close()

    assert read == {(2, 1): WHOLE, (4, 1): WHOLE, (4, 2): 0} | {
        (size, seed): WHOLE for size in (1, 2) for seed in (1, 2)
    }
