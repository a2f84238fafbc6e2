"""A model in transformers' own code on the GPU, with our attention, for families without a
fused form.

Nothing is captured, because this code may wait for the device (routed experts do).
"""

from typing import Any, cast

import torch
from torch import Tensor

from headwater.device.gpu.attention import PagedStep
from headwater.device.gpu.inputs import PackedStep
from headwater.device.model import LoadedModel
from headwater.device.parallel.sharding import own_heads


class ModuleDecoder:
    """Logits of packed steps from the model's own forward."""

    def __init__(self, model: LoadedModel) -> None:
        module: Any = model.module
        self._module = module
        self.heads = own_heads(module)

    def min_torch_tokens(self, _pool: Tensor) -> None:
        """See `FusedDecoder`. None, because torch attends no prompt of these models."""

    def logits(self, step: PackedStep, chosen: Tensor) -> Tensor:
        """Logits of the sampled rows."""
        carried = chosen.index_select(0, step.carry.clamp(min=0))
        tokens = torch.where(step.carry >= 0, carried, step.tokens)
        output = self._module(
            input_ids=tokens.long()[None],
            position_ids=step.places.positions.long()[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=step.logits_at.long(),
            attention_step=PagedStep(
                attention=step.attention,
                positions=step.places.positions,
                slots=step.places.slots,
            ),
        )
        return cast(Tensor, output.logits[0])
