"""Shapes of published models, from their configurations; weights are random."""

from collections.abc import Callable
from typing import Any

import transformers as _transformers

hf: Any = _transformers

_LLAMA: dict[str, Any] = {
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
}


def _qwen3_moe(num_layers: int) -> Any:  # noqa: ANN401 -- a configuration of transformers'
    return hf.Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=num_layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936,
        tie_word_embeddings=False, rope_theta=1e6, max_position_embeddings=40960,
    )  # fmt: skip


def _deepseek_v2_lite(num_layers: int) -> Any:  # noqa: ANN401 -- as above
    return hf.DeepseekV2Config(
        hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408,
        num_hidden_layers=num_layers, num_attention_heads=16, num_key_value_heads=16,
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2,
        first_k_dense_replace=1, n_group=1, topk_group=1, topk_method="greedy",
        routed_scaling_factor=1.0, vocab_size=102400, tie_word_embeddings=False,
        max_position_embeddings=163840,
    )  # fmt: skip


SHAPES: dict[str, Callable[[], Any]] = {
    "8b": lambda: hf.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, tie_word_embeddings=False,
        **_LLAMA,
    ),
    "1b": lambda: hf.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, vocab_size=128256, tie_word_embeddings=True, **_LLAMA,
    ),
    "qwen3-8b": lambda: hf.Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=False,
        rope_theta=1e6, max_position_embeddings=40960,
    ),
    "qwen3-30b-a3b": lambda: _qwen3_moe(48),
    "qwen3-30b-a3b-12": lambda: _qwen3_moe(12),
    "gpt-oss-20b": lambda: hf.GptOssConfig(
        hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
        vocab_size=201088, tie_word_embeddings=False, sliding_window=128,
        max_position_embeddings=131072,
    ),
    "deepseek-v2-lite": lambda: _deepseek_v2_lite(27),
    "deepseek-v2-lite-9": lambda: _deepseek_v2_lite(9),
    "gemma-3-4b": lambda: hf.Gemma3TextConfig(
        hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, vocab_size=262208, sliding_window=1024,
        query_pre_attn_scalar=256, max_position_embeddings=131072, tie_word_embeddings=True,
    ),
    "phi-4-mini": lambda: hf.Phi3Config(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=32, num_attention_heads=24,
        num_key_value_heads=8, vocab_size=200064, tie_word_embeddings=True, sliding_window=None,
        max_position_embeddings=4096, original_max_position_embeddings=4096,
    ),
    "olmo-2-7b": lambda: hf.Olmo2Config(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=100352, tie_word_embeddings=False,
        max_position_embeddings=4096,
    ),
}  # fmt: skip
"""Shapes by the name given with `--model`. `-12` is cut to 12 of 48 layers, `-9` to 9 of 27."""
