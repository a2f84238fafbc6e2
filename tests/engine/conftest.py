"""Fixtures of the tests that run on every storage backend."""

from collections.abc import Iterator

import pytest

from headwater.storage import StorageBackend
from tests.engine.matrix import BACKENDS, Bench, open_bench


@pytest.fixture(scope="module", params=BACKENDS)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    yield from open_bench(request.param, tmp_path_factory.mktemp("medium"))


@pytest.fixture(scope="module")
def backend(bench: Bench) -> Iterator[StorageBackend]:
    backend = bench.open()
    yield backend
    backend.close()
