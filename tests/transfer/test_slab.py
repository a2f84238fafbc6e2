"""The host slab, and the layout of a block."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headwater.errors import ConfigError
from headwater.transfer.layout import KVLayout
from headwater.transfer.slab import PAGE_BYTES, HostSlab, slot_bytes

LAYOUT = KVLayout(
    num_layers=4, kv_heads=2, head_dim=16, block_tokens=64, dtype="bfloat16", element_bytes=2
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def test_a_block_is_all_layers_keys_and_values():
    """Lesson 27: everything that belongs to a block is counted once, in its layout."""
    assert LAYOUT.block_bytes == 4 * 2 * 64 * 2 * 16 * 2
    assert replace(LAYOUT, planes=1).block_bytes * 2 == LAYOUT.block_bytes


@pytest.mark.parametrize(
    "change", [{"dtype": "float16"}, {"num_layers": 5}, {"kv_heads": 4}, {"planes": 1}]
)
def test_another_layout_is_another_format(change):
    """Lesson 39: two deployments whose bytes differ have no key in common."""
    assert replace(LAYOUT, **change).kv_format != LAYOUT.kv_format


def test_a_huge_slab_opens_at_once():
    """No page is allocated before it is written."""
    before = resident_bytes()

    slab = HostSlab(1024, 1 << 20)

    assert slab.memory.nbytes == 1 << 30
    assert resident_bytes() - before < 64 << 20


def test_slots_start_on_a_page_and_do_not_overlap():
    """Direct I/O needs aligned buffers; a block is exactly its bytes."""
    slab = HostSlab(3, 5000)
    for slot, view in enumerate(slab.views([0, 1, 2])):
        assert view.nbytes == 5000
        assert slab.rows[slot].ctypes.data % PAGE_BYTES == 0
        view[:] = bytes([slot + 1]) * 5000

    assert slot_bytes(5000) == 8192
    assert [set(row.tolist()) for row in slab.rows] == [{1}, {2}, {3}]


def test_views_and_rows_are_the_same_memory():
    """Nothing is repacked between copier and storage."""
    slab = HostSlab(2, 16)
    slab.rows[1] = np.arange(16)

    assert bytes(slab.view(1)) == bytes(range(16))
    assert bytes(slab.view(0)) == bytes(16)


def test_more_memory_than_available_is_a_config_error():
    """Lesson 61: the error comes at start and has the size."""
    with pytest.raises(ConfigError, match="cannot be allocated"):
        HostSlab(1 << 30, 1 << 30)
