"""Which tensors kernels may read with the copy engine."""

import torch

from headwater.device.kernels.copy_engine import can_copy


def test_whole_aligned_tiles_can_be_copied() -> None:
    """Rows of a matrix, and rows that are further apart."""
    matrix = torch.zeros(512, 256, dtype=torch.int16)

    assert can_copy(matrix, (64, 32))
    assert can_copy(matrix[::2], (64, 32))
    assert can_copy(matrix[8:], (1, 64))


def test_other_tiles_cannot_be_copied() -> None:
    """Tiles whose copies in shared memory would not be aligned, and tensors that are not."""
    matrix = torch.zeros(512, 256, dtype=torch.uint8)

    assert not can_copy(matrix, (1, 64)), "64 bytes"
    assert can_copy(matrix, (1, 128))
    assert not can_copy(matrix.T, (128, 128)), "elements that are not contiguous"
    assert not can_copy(matrix[:, 8:], (1, 128)), "address"
    assert not can_copy(torch.zeros(512, 200, dtype=torch.uint8), (1, 128)), "stride"
    assert not can_copy(matrix[0].expand(512, 256), (1, 128)), "one row, repeated"
    assert not can_copy(torch.zeros(512, 512), (1, 512)), "side"
