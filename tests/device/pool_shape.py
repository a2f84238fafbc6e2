"""The part of a model that a KV pool needs, for tests without a model."""

import torch

from headwater.device.model import LoadedModel


class PoolShape:
    """Sizes and types of one pool; `has_fp8_kv` stores KV in 8 bits."""

    planes, value_dim = 2, 0
    share = None
    total_kv_heads = 0
    layout = LoadedModel.layout

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_fp8_kv: bool = False,
    ) -> None:
        self.num_layers, self.kv_heads, self.head_dim = num_layers, kv_heads, head_dim
        self.dtype, self.device, self.has_fp8_kv = dtype, device, has_fp8_kv


def shape_of_2_mib_blocks() -> PoolShape:
    """A pool on a GPU whose blocks of 64 tokens take 2 MiB."""
    return PoolShape(8, 8, 128, dtype=torch.bfloat16, device=torch.device("cuda", 0))
