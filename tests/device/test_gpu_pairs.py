"""Short chunks after long prefixes, two heads at a time, against float64."""

import numpy as np
import pytest
import torch

from headwater.device.attention.base import Variant
from tests.device.gpu import DEVICE, pytestmark, require_gpu

require_gpu()

from headwater.device.kernels.prefill import takes_pairs  # noqa: E402 - it imports Triton
from tests.device.test_gpu_kernels import Pool, check_chunks, chunk_work, ints  # noqa: E402

__all__ = ["pytestmark"]

CHUNKS = (
    ([64], [9000]),  # many parts
    ([17], [4113]),  # the last tile of keys and the last page are not full
    ([1, 64, 40, 33], [2049, 2112, 8232, 4096]),  # rows of different lengths
    ([64], [1088]),  # the queries' own keys begin with a part
)


@pytest.mark.parametrize("num_parts", [2, 8, 16])
@pytest.mark.parametrize("shape", [(32, 8, 128, 64), (16, 8, 64, 64), (12, 2, 128, 128)])
def test_short_chunks_of_pairs_of_heads(
    shape: tuple[int, int, int, int], num_parts: int
) -> None:
    """Results are right for any number of parts, some of which have no keys, whatever an earlier
    owner left in the blocks."""
    pool = Pool(shape, torch.bfloat16)
    if not takes_pairs(pool.data, pool.heads, 64):
        pytest.skip("for Hopper, and a version of Triton it is known to work with")
    for counts, contexts in CHUNKS:
        tables = pool.own_tables(contexts)
        work = chunk_work(pool, counts, contexts, tables)
        assert work.tile == 64
        sizes = -(-np.array(contexts) // (num_parts * 128)) * 128
        work.num_parts, work.part_keys = num_parts, ints(sizes[work.tile_row.tolist()])
        shape_of_parts = len(work.tile_row), num_parts, work.tile, pool.heads
        nan = float("nan")
        work.partial = torch.full((*shape_of_parts, pool.dim), nan, device=DEVICE)
        work.partial_lse = torch.full(shape_of_parts, nan, device=DEVICE)
        check_chunks(pool, work, tables, Variant(pool.dim**-0.5))
