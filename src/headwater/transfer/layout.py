"""What a block's bytes are: arithmetic over the model's shape, and nothing else."""

from dataclasses import dataclass

LAYOUT_VERSION = 1
"""Of the order of bytes inside a block; another order is another format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """One block: `[layers, planes, block_tokens, kv_heads, head_dim]`, the same in every tier."""

    num_layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    element_bytes: int
    planes: int = 2
    """Keys and values; a model with one latent has one plane."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        elements = self.num_layers * self.planes * self.block_tokens
        return elements * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def kv_format(self) -> str:
        """Goes into every key: blocks of two formats are never mistaken for one another."""
        shape = f"{self.num_layers}x{self.planes}x{self.block_tokens}"
        return f"{self.dtype}/{shape}x{self.kv_heads}x{self.head_dim}/{LAYOUT_VERSION}"
