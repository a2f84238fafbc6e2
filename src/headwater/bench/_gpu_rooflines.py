"""The least that the attention of a model must read and multiply, layer by layer.

A layer with a sliding window reads at most that many tokens of a row, however long its context is.
"""

from typing import Any


def kv_tokens_read(config: Any, context: int) -> float:  # noqa: ANN401 -- of transformers
    """Tokens of a row whose KV a decode step reads, on average over the layers."""
    windows = _windows(config)
    return sum(min(context, window or context) for window in windows) / len(windows)


def pairs_attended(config: Any, length: int) -> float:  # noqa: ANN401 -- of transformers
    """Pairs of a query and a key in a prompt without cached tokens, summed over the layers."""
    return sum(_pairs(length, window or length) for window in _windows(config))


def _pairs(length: int, window: int) -> float:
    seen = min(window, length)
    return seen * (length - seen / 2)


def _windows(config: Any) -> list[int | None]:  # noqa: ANN401 -- of transformers
    """The sliding window of each layer; None for a layer without one."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in kinds]
