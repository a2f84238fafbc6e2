"""The interface to transformers: the attention function that its model code calls in each
layer.

The `AttentionStep` of a step is a keyword argument of the call, so there is no state here.
transformers builds no mask for an unknown implementation: windows, soft-caps and sinks come as
keywords, and this module must pass them on. Layers with latent KV attend with absorbed queries
(`latent`).
"""

from typing import NamedTuple, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "headwater"
"""Our name among transformers' attention implementations."""


class Variant(NamedTuple):
    """How one layer attends, as its model code specifies."""

    scaling: float
    window: int | None = None
    """A token sees this many tokens, including itself; None means all tokens before it."""

    softcap: float | None = None
    sinks: Tensor | None = None
    """Per head: a score that takes part in the softmax and has no value."""

    @property
    def has_plain_scores(self) -> bool:
        """Whether scores are scaled products without further changes."""
        return self.softcap is None and self.sinks is None


class AttentionStep(Protocol):
    """What all layers of one step share, and how they attend."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant
    ) -> Tensor:
        """Store K and V of the packed tokens, `[tokens, kv_heads, head_dim]`; attend with Q.

        Returns `[tokens, heads, head_dim]`. Called once per layer, in order.
        """


def register() -> None:
    """Register our attention with transformers. Calling it again is harmless."""
    AttentionInterface.register(ATTENTION, _attend)


def _attend(  # noqa: PLR0913 - transformers says what an attention function is given
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    attention_step: AttentionStep,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    latent = getattr(module, "latent", None)
    own = query[0].transpose(0, 1)
    out = attention_step.attend(
        module.layer_idx,  # type: ignore[arg-type]  # an int on every attention module
        own if latent is None else latent.absorb(own),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        Variant(scaling, sliding_window, softcap, s_aux),
    )
    return (out if latent is None else latent.values(out)).unsqueeze(0), None
