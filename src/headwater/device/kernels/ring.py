"""Buffers in shared memory that some warps fill and others read, in Gluon."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


class Ring(NamedTuple):
    """Buffers, and barriers that tell which of them are filled and which are free."""

    buffers: Any
    ready: Any
    empty: Any


@gluon.jit
def make_ring(dtype: gl.constexpr, layout: gl.constexpr, NUMBER: gl.constexpr, ROWS: gl.constexpr,
              COLUMNS: gl.constexpr, READERS: gl.constexpr):  # fmt: skip
    """`NUMBER` buffers. `READERS` readers must leave a buffer before it is filled again."""
    buffers = gl.allocate_shared_memory(dtype, [NUMBER, ROWS, COLUMNS], layout)
    ready = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(NUMBER):
        mbarrier.init(ready.index(number), count=1)
        mbarrier.init(empty.index(number), count=READERS)
    return Ring(buffers, ready, empty)


@gluon.jit
def await_room(ring, use, num_bytes):
    """Wait until all readers have left the buffer of a use, counted from 0, and return it. Its
    barrier then expects `num_bytes`."""
    number: gl.constexpr = ring.buffers.type.shape[0]
    at = use % number
    mbarrier.wait(ring.empty.index(at), ((use // number) & 1) ^ 1)
    mbarrier.expect(ring.ready.index(at), num_bytes)
    return ring.buffers.index(at), ring.ready.index(at)


@gluon.jit
def await_filled(ring, use):
    """Wait until the buffer of a use, counted from 0, is filled, and return it."""
    number: gl.constexpr = ring.buffers.type.shape[0]
    mbarrier.wait(ring.ready.index(use % number), (use // number) & 1)
    return ring.buffers.index(use % number)


@gluon.jit
def leave(ring, use):
    """Report that one reader has finished with the buffer of a use."""
    number: gl.constexpr = ring.buffers.type.shape[0]
    mbarrier.arrive(ring.empty.index(use % number), count=1)
