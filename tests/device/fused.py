"""A model whose layers are those of the fused decoder, for a CPU with Triton's interpreter.

Only attention and CUDA graphs are not the GPU's: attention is that of the CPU runner, so a
driver can compute chunks, prefixes and batches with it.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from headwater.device.attention.base import AttentionStep, Variant
from headwater.device.gpu.decoder import FusedDecoder, TokenSlots
from headwater.device.gpu.fused_check import fused_decoder
from headwater.device.model import LoadedModel


class FusedModule(nn.Module):
    """Called like a transformers model, computes with the fused decoder."""

    def __init__(self, model: LoadedModel, decoder: FusedDecoder) -> None:
        super().__init__()
        self._model, self.decoder = model, decoder

    def forward(
        self,
        *,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        attention_step: AttentionStep,
        **_: Any,
    ) -> SimpleNamespace:
        """Logits of the tokens in `logits_to_keep`."""
        decoder, num_tokens = self.decoder, input_ids.shape[1]
        pool = scratch_pool(self._model, num_tokens)
        positions = position_ids[0].int()
        # Each token in a block of its own, wherever it is in its sequence.
        slots = torch.arange(num_tokens, dtype=torch.int32)
        places = TokenSlots(positions, slots)

        def attend(number: int, packed: Tensor, variant: Variant) -> Tensor:
            query = packed.view(num_tokens, -1, pool.shape[-1])[:, : decoder.heads]
            stored = pool[:, number, :, 0]
            key, value = stored[:, 0], stored[:, -1]
            out = attention_step.attend(number, query, key, value, variant)
            return out[..., : self._model.value_dim].reshape(num_tokens, -1)

        hidden = decoder.embed(input_ids[0].int(), torch.full_like(slots, -1), slots)
        hidden = decoder.run(hidden, places, pool, attend, is_eager=True)
        return SimpleNamespace(logits=decoder.logits(hidden[logits_to_keep])[None])


def scratch_pool(model: LoadedModel, num_blocks: int, block_tokens: int = 1) -> Tensor:
    """A pool in the layout of the kernels."""
    shape = (num_blocks, model.num_layers, model.planes, block_tokens)
    return torch.zeros((*shape, model.kv_heads, model.head_dim), dtype=model.dtype)


def fused(model: LoadedModel) -> LoadedModel | None:
    """The model in its fused form, or None if it has none."""
    with torch.inference_mode():
        decoder = fused_decoder(model.module, model.max_model_len)
    return None if decoder is None else replace(model, module=FusedModule(model, decoder))
