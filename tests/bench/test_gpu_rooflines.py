"""The limits that `headwater bench gpu` compares with."""

from types import SimpleNamespace

from headwater.bench._gpu_rooflines import kv_tokens_read, pairs_attended

PLAIN = SimpleNamespace(num_hidden_layers=3)
MIXED = SimpleNamespace(
    num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=128
)


def test_a_sliding_window_bounds_the_tokens_that_are_read() -> None:
    """Half of GPT-OSS's layers read 128 tokens, so the mean is far below the context."""
    assert kv_tokens_read(PLAIN, 1024) == 1024
    assert kv_tokens_read(MIXED, 1024) == (128 + 1024) / 2
    assert kv_tokens_read(MIXED, 100) == 100


def test_a_sliding_window_bounds_the_pairs_of_a_prompt() -> None:
    """A causal prompt has half of all pairs; with a window, every query sees as many keys as
    the window has, except the first ones."""
    assert pairs_attended(PLAIN, 1000) == 3 * 1000**2 / 2
    assert pairs_attended(MIXED, 1000) == 1000**2 / 2 + 128 * (1000 - 64)


def test_a_window_without_kinds_of_layers_is_not_used() -> None:
    """A model whose configuration names a window but no kinds of layers does not use the
    window."""
    config = SimpleNamespace(num_hidden_layers=1, sliding_window=128)
    assert kv_tokens_read(config, 1024) == 1024
