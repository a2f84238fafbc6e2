"""Models made once for all device tests, in a separate cache folder."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from headwater.device.model import LoadedModel, load
from tests.device.families import Reference, save_family


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No file of the user is read or written, and the hub is never contacted."""
    named = {"HEADWATER_CACHE": str(tmp_path_factory.mktemp("cache")), "HF_HUB_OFFLINE": "1"}
    before = {name: os.environ.get(name) for name in named}
    os.environ.update(named)
    torch.set_num_threads(1)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model of a family, made on first use."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = save_family(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(scope="session")
def llama(family: Callable[[str], Path]) -> LoadedModel:
    return load(family("llama"))


@pytest.fixture(scope="session")
def llama_reference(family: Callable[[str], Path]) -> Reference:
    return Reference(family("llama"))
