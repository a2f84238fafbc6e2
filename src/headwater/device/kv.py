"""The KV pool: one tensor `[blocks, layers, planes, block_tokens, kv_heads, head_dim]`.

`transfer.layout` defines the bytes of a block, which are one contiguous piece. Everything here
uses slots; the cache decides which block is in which slot. With one plane, a stored vector is
both key and value (`latent`).

    flat rows   slot 0: layer 0: K of token 0, 1, … | V of token 0, 1, … | layer 1: K … | V …
"""

import logging
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headwater.device import pages
from headwater.device.host_ops import host_ops
from headwater.device.model import LoadedModel
from headwater.errors import ConfigError, DeviceError
from headwater.transfer.layout import KVLayout
from headwater.transfer.shared import SharedPages

if TYPE_CHECKING:
    from headwater.device.gpu.virtual_memory import ExportedMemory

Ints = NDArray[np.int64]

log = logging.getLogger(__name__)


class BlockPart(NamedTuple):
    """The KV heads of one rank in a whole block."""

    whole: KVLayout
    first_head: int
    end_head: int
    is_written: bool
    """Whether this rank writes these heads to lower tiers; if several ranks have the same
    heads, only one does."""


def _block_part(model: LoadedModel, block_tokens: int) -> BlockPart | None:
    """The part of `model`'s rank; None if there is one rank."""
    share = model.share
    if share is None or share.size == 1:
        return None
    whole = model.whole_layout(block_tokens)
    first, end = share.kv_heads(whole.kv_heads)
    return BlockPart(whole, first, end, share.writes_kv(whole.kv_heads))


class KVPool:
    """KV of every device block, and how often each slot was written."""

    def __init__(
        self, model: LoadedModel, *, num_blocks: int, block_tokens: int, shared: bool = False
    ) -> None:
        """Peers on this machine may map the memory of a `shared` pool."""
        self.layout = model.layout(block_tokens)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.num_layers, self.kv_heads = model.num_layers, model.kv_heads
        self.head_dim, self.planes = model.head_dim, model.planes
        self.value_dim = model.value_dim or model.head_dim
        self.device = model.device
        self.dtype = model.dtype
        """Dtype of the model's computation, whatever the storage format."""

        # Zeros, because a masked key is still multiplied by its zero weight, and zero times a
        # stray NaN is NaN.
        self.blocks, self.pages = _zeros(
            (num_blocks, self.layout.block_bytes), model, shared=shared
        )
        """The bytes of every block, `[blocks, block_bytes]`; and the memory behind them if peers
        may map it."""
        self.data = self._numbers()
        """Their elements, `[blocks, layers, planes, block_tokens, kv_heads, head_dim]`."""
        self.writes: Ints = np.zeros(num_blocks, dtype=np.int64)
        """Per slot: a count that changes with every step or copy that writes to it."""
        self.part = _block_part(model, block_tokens)
        """The part of a whole block that is here; None means all of it."""
        self.ops = host_ops(model.device, model.dtype)
        self._scratch = [self.data.new_empty(0), self.data.new_empty(0)]

    def _numbers(self) -> Tensor:
        shape = (
            *(self.num_layers, self.planes, self.block_tokens),
            *(self.kv_heads, self.head_dim),
        )
        data = self.blocks.view(self.dtype).view(self.num_blocks, *shape)
        self._token_rows = data.view(-1, self.kv_heads * self.head_dim)
        self._head_rows = data.view(-1, self.head_dim)
        return data

    @property
    def num_bytes(self) -> int:
        return self.blocks.nbytes

    def rounded(self, heads: Tensor) -> Tensor:
        """K or V as they are read back from the pool; here unchanged."""
        return heads

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block in lower tiers and on links: the parts of all ranks."""
        return (self.layout if self.part is None else self.part.whole).block_bytes

    def mark_written(self, slots: Ints) -> None:
        """Call it before writing to slots: it invalidates other copies of their KV."""
        self.writes[slots] += 1

    def rows_of(self, slots: Ints, offsets: Ints) -> Tensor:
        """Flat row of the KV of each token, as `[layers, planes, tokens]`."""
        planes = self.num_layers * self.planes
        layers = np.arange(planes).reshape(self.num_layers, self.planes, 1)
        rows = (slots * planes + layers) * self.block_tokens + offsets
        return torch.from_numpy(rows).to(self.device)

    def write(self, rows: Tensor, tokens: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store K and V of `tokens` in one layer. `keys` and `values` are `[…, kv_heads,
        head_dim]`; `rows`, `[planes, tokens]`, are the tokens' rows in the layer."""
        for plane, source in zip(rows, (keys, values), strict=False):
            self.ops.scatter(source, tokens, plane, self._token_rows)

    def write_heads(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store K and V, each `[layers * tokens * kv_heads, head_dim]`, at `rows`, which are
        `[layers, planes, tokens]`."""
        heads = torch.arange(self.kv_heads, device=self.device)
        by_head = rows[..., None] * self.kv_heads + heads
        for plane, source in zip(by_head.unbind(1), (keys, values), strict=False):
            self._head_rows.index_copy_(0, plane.flatten(), source)

    def read(self, slots: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """K and V, `[tokens, kv_heads, head_dim]`, of one layer of the blocks in these slots.

        They are in scratch buffers, which are valid until the next read: new memory of this
        size would cost more page faults than the copy itself.
        """
        rows = (slots * self.num_layers + layer) * self.planes
        planes = self.data.view(self.num_blocks * self.num_layers * self.planes, -1)
        shape = (-1, self.kv_heads, self.head_dim)
        keys = self._take(planes, rows, 0).view(shape)
        if self.planes == 1:
            return keys, keys
        return keys, self._take(planes, rows + 1, 1).view(shape)

    def read_whole(self, slots: Tensor) -> Tensor:
        """All layers of these blocks, `[blocks, layers, planes, …]`, in a scratch buffer."""
        taken = self._take(self.data.view(self.num_blocks, -1), slots, 0)
        return taken.view(-1, *self.data.shape[1:])

    def _take(self, source: Tensor, rows: Tensor, buffer: int) -> Tensor:
        needed = rows.numel() * source.shape[1]
        if self._scratch[buffer].numel() < needed:
            self._scratch[buffer] = source.new_empty(needed + needed // 2)
        into = self._scratch[buffer][:needed].view(rows.numel(), source.shape[1])
        return torch.index_select(source, 0, rows, out=into)


def _zeros(
    shape: tuple[int, int], model: LoadedModel, *, shared: bool
) -> "tuple[Tensor, SharedPages | ExportedMemory | None]":
    try:
        if shared and model.device.type == "cuda":
            exported = _exported_memory(math.prod(shape), model.device)
            if exported is not None:
                return exported.mapped.tensor(shape).zero_(), exported
        elif shared:
            return pages.shared_zeros(shape, dtype=torch.uint8)
        return pages.zeros(shape, dtype=torch.uint8, device=model.device), None
    except (RuntimeError, OSError, OverflowError) as exc:
        gib = math.prod(shape) / (1 << 30)
        raise ConfigError(
            f"{shape[0]:,} blocks of KV take {gib:,.1f} GiB, which is more than {model.device} has; "
            "ask for fewer with --num-gpu-blocks-override"
        ) from exc


def _exported_memory(num_bytes: int, device: torch.device) -> "ExportedMemory | None":
    """Memory of a GPU that peers can map; None if the GPU or its driver gives none."""
    from headwater.device.gpu.virtual_memory import ExportedMemory

    try:
        return ExportedMemory(num_bytes, device)
    except (DeviceError, ConfigError) as exc:
        log.warning("peers cannot map the KV blocks of %s: reason=%s", device, exc)
        return None
