"""Which scales torch's products with FP8 weights in blocks use."""

import torch

from headwater.device.gpu import fp8_blocks


def stored(blocks: torch.Tensor) -> torch.Tensor:
    """Scales of each output and group, with groups first in memory."""
    return blocks.repeat_interleave(128, 0).T.contiguous().T


def test_scales_of_whole_blocks_are_found() -> None:
    """They are taken from the scales of outputs, if all outputs of each block agree."""
    blocks = torch.rand(3, 8)

    found = fp8_blocks.block_scales(stored(blocks))

    assert found is not None
    assert torch.equal(found, blocks)
    assert found.is_contiguous()
    other = stored(blocks)
    other[200, 5] += 1
    assert fp8_blocks.block_scales(other) is None, "outputs of a block differ"
    assert fp8_blocks.block_scales(stored(blocks)[:320]) is None, "the last block is not whole"
    assert fp8_blocks.block_scales(stored(blocks)[:, :6]) is None, "versions disagree"


def test_blocks_need_enough_tiles() -> None:
    """Few rows and small weights use the scales of outputs, as measured on an H200."""
    qkv, gate_up, out = 6144, 28672, 4096

    assert not any(fp8_blocks.prefers_blocks(32, lines) for lines in (qkv, gate_up, out))
    assert fp8_blocks.prefers_blocks(128, gate_up)
    assert not fp8_blocks.prefers_blocks(128, out)
    assert all(fp8_blocks.prefers_blocks(512, lines) for lines in (qkv, gate_up, out))
    assert [fp8_blocks.padded(rows) for rows in (1, 4, 5, 8)] == [4, 4, 8, 8]


def test_other_devices_have_no_products() -> None:
    assert fp8_blocks.offered_types(torch.device("cpu"), 256, 512) == ()
