"""Engines of several ranks over one small model and one store."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.device.builtin import make_llama
from headwater.launch.kept_host import KeptHost
from headwater.launch.llm import LLM
from tests.launch.rank_engines import BLOCK, SHAPE, Open, make_prompts, say


@pytest.fixture
def kept() -> Iterator[KeptHost]:
    """Memory of a host tier that outlives its engines, as a server keeps it."""
    files = os.memfd_create("blocks"), os.memfd_create("slots")
    yield KeptHost(*files)
    for file in files:
        os.close(file)


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    before = os.environ.get("HEADWATER_CACHE")
    os.environ["HEADWATER_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.pop("HEADWATER_CACHE")
    if before is not None:
        os.environ["HEADWATER_CACHE"] = before


@pytest.fixture(scope="module")
def folder(own_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"), SHAPE, seed=3)


@pytest.fixture(scope="module")
def open_engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Engines over one model and one store; one at a time."""
    store = tmp_path_factory.mktemp("store")

    def open_one(**settings: Any) -> LLM:
        return LLM(
            str(folder),
            block_tokens=BLOCK,
            max_batched_tokens=32,
            max_num_seqs=8,
            load_policy="wait",
            write_policy="write_through",
            **{
                "num_blocks_override": 64,
                "swap_space_gib": 0.02,
                "storage_backend": "file",
                "storage_config": {"path": str(store), "capacity_bytes": 50 << 20},
                **settings,
            },
        )

    return open_one


@pytest.fixture(scope="module")
def stored_by_one(open_engine: Open) -> list[list[int]]:
    """The output of one rank for a prompt whose blocks it leaves in storage."""
    engine = open_engine()
    tokens, _ = say(engine, make_prompts(1, 61, 45))
    engine.core.close()
    return tokens
