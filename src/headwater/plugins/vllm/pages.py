"""Copies between vLLM's KV cache, a tensor per layer, and host slots, one contiguous block each.

    slot   | layer 0 page | layer 1 page | …      in the order of vLLM's layer names

torch is vLLM's: it is imported when the KV cache is registered.
"""

from typing import Any

from headwater.errors import ConfigError
from headwater.transfer.slab import HostSlab


class KVPages:
    """The KV cache of one worker. Tensors are indexed by KV block first."""

    def __init__(self, layers: dict[str, Any], num_blocks: int) -> None:
        import torch

        self._torch = torch
        self._layers: list[Any] = []
        seen: set[int] = set()
        for name, tensor in layers.items():
            if tensor.shape[0] < num_blocks:
                raise ConfigError(
                    f"the KV cache of layer {name} has shape {tuple(tensor.shape)}: its first "
                    f"dimension is not the {num_blocks} KV blocks; this layout is not supported"
                )
            if tensor.data_ptr() not in seen:  # layers may share one cache
                seen.add(tensor.data_ptr())
                # Bytes, so that element types without arithmetic are copied too.
                self._layers.append(tensor.view(torch.uint8))
        self.block_bytes = sum(layer[0].numel() for layer in self._layers)
        self._host: list[Any] = []

    def bind(self, slab: HostSlab) -> None:
        """Copy to and from the slots of `slab` from now on."""
        whole = self._torch.frombuffer(slab.memory, dtype=self._torch.uint8)
        slots = whole[: slab.num_slots * slab.slot_bytes].view(slab.num_slots, slab.slot_bytes)
        self._host, at = [], 0
        for layer in self._layers:
            size = layer[0].numel()
            page = slots[:, at : at + size]
            self._host.append(page.view(slab.num_slots, *layer.shape[1:]))
            at += size

    def save(self, block_ids: list[int], slots: list[int]) -> None:
        """Copy KV blocks to slots. Returns when the bytes are there."""
        blocks, places = self._torch.tensor(block_ids), self._torch.tensor(slots)
        for layer, host in zip(self._layers, self._host, strict=True):
            chosen = layer.index_select(0, blocks.to(layer.device))
            host.index_copy_(0, places, chosen.to(host.device))

    def load(self, slots: list[int], block_ids: list[int]) -> None:
        """Copy slots to KV blocks."""
        blocks, places = self._torch.tensor(block_ids), self._torch.tensor(slots)
        for layer, host in zip(self._layers, self._host, strict=True):
            chosen = host.index_select(0, places)
            layer.index_copy_(0, blocks.to(layer.device), chosen.to(layer.device))
