"""Copies between vLLM's KV cache, a tensor per layer, and host slots, one contiguous block each.

    slot   | layer 0 page | layer 1 page | …      in the order of vLLM's layer names

torch comes from vLLM and is imported when the KV cache is registered.
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
            if tensor.shape[0] % num_blocks:
                raise ConfigError(
                    f"the KV cache of layer {name} has shape {tuple(tensor.shape)}: its first "
                    f"dimension is not the {num_blocks} KV blocks; this layout is not supported"
                )
            if tensor.data_ptr() not in seen:  # layers may share one cache
                seen.add(tensor.data_ptr())
                # Where a kernel takes smaller blocks, vLLM divides each KV block into several
                # rows: they are one page here, because block numbers count KV blocks.
                blocks = tensor.unflatten(0, (num_blocks, -1)).squeeze(1)
                self._layers.append(_as_rows(blocks).view(torch.uint8))
        self.block_bytes = sum(layer[0].numel() for layer in self._layers)
        self._host: list[Any] = []

    def bind(self, slab: HostSlab) -> None:
        """Copy from and to the slots of `slab` from now on."""
        whole = self._torch.frombuffer(slab.memory, dtype=self._torch.uint8)
        slots = whole[: slab.num_slots * slab.slot_bytes].view(slab.num_slots, slab.slot_bytes)
        self._host, at = [], 0
        for layer in self._layers:
            size = layer[0].numel()
            page = slots[:, at : at + size]
            self._host.append(page.view(slab.num_slots, *layer.shape[1:]))
            at += size

    def describe(self) -> str:
        """Shapes of the pages in memory; part of the identity of a block."""
        return " ".join(str(tuple(layer.shape[1:])) for layer in self._layers)

    def save(self, block_ids: list[int], slots: list[int]) -> None:
        """Copy KV blocks to slots. Returns when the bytes have arrived."""
        for layer, host in zip(self._layers, self._host, strict=True):
            if layer.is_cpu:
                pages = [layer[block] for block in block_ids]
            else:  # one gather and one copy over the bus, not one per block
                chosen = self._torch.tensor(block_ids, device=layer.device)
                pages = layer.index_select(0, chosen).cpu()
            # Row by row is memcpy; an index over rows with gaps copies byte by byte.
            for slot, page in zip(slots, pages, strict=True):
                host[slot].copy_(page)

    def load(self, slots: list[int], block_ids: list[int]) -> None:
        """Copy slots to KV blocks."""
        for layer, host in zip(self._layers, self._host, strict=True):
            pages = [host[slot] for slot in slots]
            if layer.is_cpu:
                for block, page in zip(block_ids, pages, strict=True):
                    layer[block].copy_(page)
            else:
                chosen = self._torch.tensor(block_ids, device=layer.device)
                layer.index_copy_(0, chosen, self._torch.stack(pages).to(layer.device))


def _as_rows(tensor: Any) -> Any:  # noqa: ANN401 - a tensor
    """The same bytes with the dimensions of a page in memory order, so that a page without gaps
    is one contiguous row."""
    inner = sorted(range(1, tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.permute(0, *inner)
