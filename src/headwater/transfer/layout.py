"""The layout of a block's bytes, calculated from the shape of the model.

    block   | layer 0 | layer 1 | …
    layer   | numbers [planes, block_tokens, kv_heads, head_dim] | scales [planes, block_tokens, kv_heads] |

Scales exist only if numbers are stored with fewer bits than the model computes with. They are
part of their layer's bytes, so a block, or a group of its layers, is one contiguous piece.
"""

from dataclasses import dataclass

_LAYOUT_VERSION = 1
"""Version of the byte order inside a block. Another order is another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The bytes of one block, the same in every tier."""

    num_layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    element_bytes: int
    planes: int = 2
    """2 for keys and values; 1 for a model that stores one latent."""

    scale_bytes: int = 0
    """Bytes of the scale of one head of one token; 0 means no scales."""

    @property
    def numbers_bytes(self) -> int:
        """Bytes of one layer before its scales."""
        heads = self.planes * self.block_tokens * self.kv_heads
        return heads * self.head_dim * self.element_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block."""
        heads = self.planes * self.block_tokens * self.kv_heads
        return self.numbers_bytes + heads * self.scale_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.layer_bytes

    @property
    def kv_format(self) -> str:
        """Part of every block key, so that blocks of two formats are never confused."""
        shape = f"{self.num_layers}x{self.planes}x{self.block_tokens}"
        return f"{self.dtype}/{shape}x{self.kv_heads}x{self.head_dim}/{_LAYOUT_VERSION}"
