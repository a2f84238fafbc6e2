"""A tiny random-weight model of each served family, with its own `generate` as the
reference."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from headwater.types import Tokens
from tests.ties import NEAR_TIE

log = logging.getLogger(__name__)

VOCAB = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WINDOW: dict[str, Any] = {"sliding_window": 9}
_MIXED: dict[str, Any] = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2}

_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}


_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def _latent(**changed: Any) -> dict[str, Any]:
    return {**_without("head_dim", "num_key_value_heads"), **_LATENT, **changed}


def _without(*names: str) -> dict[str, Any]:
    """The sizes for a family that derives some of them."""
    return {name: size for name, size in _SIZES.items() if name not in names}


FAMILIES: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**_SIZES),
    "qwen2": lambda: hf.Qwen2Config(**_SIZES, **_MIXED, use_sliding_window=True),
    "qwen3": lambda: hf.Qwen3Config(**_SIZES),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **_SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mistral": lambda: hf.MistralConfig(**_SIZES, **_WINDOW),
    "gemma2": lambda: hf.Gemma2Config(
        **_SIZES,
        **_MIXED,
        tie_word_embeddings=False,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=20.0,
        query_pre_attn_scalar=1,
    ),
    "gemma3_text": lambda: hf.Gemma3TextConfig(
        **_SIZES, **_MIXED, tie_word_embeddings=False, query_pre_attn_scalar=1
    ),
    "phi3": lambda: hf.Phi3Config(**_SIZES, **_WINDOW),
    "olmo2": lambda: hf.Olmo2Config(**_SIZES),
    "granite": lambda: hf.GraniteConfig(
        **_SIZES,
        attention_multiplier=0.4,
        embedding_multiplier=2.0,
        logits_scaling=0.7,
        residual_multiplier=0.8,
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_SIZES, **_MIXED, num_local_experts=4, num_experts_per_tok=2
    ),
    "arcee": lambda: hf.ArceeConfig(**_SIZES),
    "cohere": lambda: hf.CohereConfig(**_SIZES),
    "cohere2": lambda: hf.Cohere2Config(**_SIZES, **_MIXED),
    "axk1": lambda: hf.AXK1Config(
        **_latent(**_ROUTED, n_group=2, topk_group=1, routed_scaling_factor=1.0)
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(
        **_latent(
            **_ROUTED,
            q_lora_rank=None,
            n_group=2,
            topk_group=1,
            topk_method="group_limited_greedy",
            routed_scaling_factor=1.5,
        )
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **_latent(
            **_ROUTED,
            n_group=2,
            topk_group=1,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 128,
            },
        )
    ),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(
        **_latent(**_ROUTED, n_group=1, topk_group=1)
    ),
    "longcat_flash": lambda: hf.LongcatFlashConfig(
        **_latent(
            head_dim=8,
            ffn_hidden_size=96,
            expert_ffn_hidden_size=32,
            moe_topk=2,
            n_routed_experts=4,
            zero_expert_num=2,
        )
    ),
    "minicpm3": lambda: hf.MiniCPM3Config(
        **_latent(scale_emb=1, scale_depth=2.0, dim_model_base=32, hidden_size=64)
    ),
    "youtu": lambda: hf.YoutuConfig(**_latent()),
    "dots1": lambda: hf.Dots1Config(**_SIZES, **_ROUTED, n_group=1, topk_group=1),
    "ernie4_5": lambda: hf.Ernie4_5Config(**_SIZES),
    "exaone4": lambda: hf.Exaone4Config(**_SIZES, **_MIXED),
    "gemma": lambda: hf.GemmaConfig(**_SIZES, tie_word_embeddings=False),
    "glm": lambda: hf.GlmConfig(**_SIZES),
    "glm4": lambda: hf.Glm4Config(**_SIZES),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **_SIZES, **_ROUTED, n_group=2, topk_group=1, use_qk_norm=True
    ),
    "granitemoe": lambda: hf.GraniteMoeConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2
    ),
    "helium": lambda: hf.HeliumConfig(**_SIZES),
    "hunyuan_v1_dense": lambda: hf.HunYuanDenseV1Config(**_SIZES),
    "ministral": lambda: hf.MinistralConfig(**_SIZES, **_MIXED),
    "mixtral": lambda: hf.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "olmo": lambda: hf.OlmoConfig(**_SIZES),
    "olmo3": lambda: hf.Olmo3Config(**_SIZES, **_MIXED),
    "olmoe": lambda: hf.OlmoeConfig(
        **_without("head_dim"), num_experts=4, num_experts_per_tok=2
    ),
    "phi": lambda: hf.PhiConfig(**_SIZES),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **_SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    ),
    "seed_oss": lambda: hf.SeedOssConfig(**_SIZES),
    "smollm3": lambda: hf.SmolLM3Config(**_SIZES),
    "afmoe": lambda: hf.AfmoeConfig(
        **_SIZES, **_MIXED, **_EXPERTS, moe_intermediate_size=32, num_dense_layers=1
    ),
    "cwm": lambda: hf.CwmConfig(**{**_SIZES, "bos_token_id": 1}, **_MIXED),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(
        **_SIZES,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=32,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "exaone_moe": lambda: hf.ExaoneMoeConfig(
        **_SIZES, **_MIXED, **_EXPERTS, moe_intermediate_size=32
    ),
    "flex_olmo": lambda: hf.FlexOlmoConfig(**_without("head_dim"), **_EXPERTS),
    "granitemoeshared": lambda: hf.GraniteMoeSharedConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32
    ),
    "jais2": lambda: hf.Jais2Config(**_SIZES),
    "minimax_m2": lambda: hf.MiniMaxM2Config(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2
    ),
    "nanochat": lambda: hf.NanoChatConfig(**_SIZES),
    "solar_open": lambda: hf.SolarOpenConfig(**_SIZES, **_ROUTED, n_group=1, topk_group=1),
    "starcoder2": lambda: hf.Starcoder2Config(**_SIZES, **_WINDOW),
}


def save_family(name: str, folder: Path, *, seed: int = 0, **changed: Any) -> Path:
    """Write a model of this family whose attention affects its output, with some settings
    changed."""
    torch.manual_seed(seed)
    make: Any = hf.AutoModelForCausalLM
    config = FAMILIES[name]()
    config.update(changed)
    model = make.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * (1.0 if "sinks" in label else 0.1))
            else:
                weight.normal_(std=1.6 / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return folder


def quantize_experts(folder: Path) -> None:
    """Give a gpt_oss model 4-bit experts, as in its published weights."""
    random = torch.Generator().manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for name in [
        n for n in weights if n.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, inward, outward = weights.pop(name).shape
        shape = (experts, outward, inward // 32)
        whole = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
        weights[name + "_blocks"] = whole
        weights[name + "_scales"] = torch.randint(
            121, 125, shape, dtype=torch.uint8, generator=random
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def prompt(num_tokens: int, *, seed: int = 0) -> Tokens:
    random = np.random.default_rng(seed)
    return random.integers(1, VOCAB, num_tokens).astype(np.int32)


class Reference:
    """A model folder loaded by transformers, with its own attention and cache."""

    def __init__(self, folder: Path, **loading: object) -> None:
        loader: Any = hf.AutoModelForCausalLM
        model = loader.from_pretrained(
            folder,
            attn_implementation="eager",
            dtype=torch.float32,
            local_files_only=True,
            **loading,
        )
        for weight in model.parameters():
            weight.data = weight.data.float()
        self._model = model.eval()

    def generate(self, tokens: Tokens, count: int) -> tuple[list[int], list[float]]:
        """Greedy tokens, and the gap between the two best logits at each."""
        out = self._model.generate(
            torch.from_numpy(tokens.astype(np.int64))[None],
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = torch.cat(out.logits).topk(2, dim=-1).values
        return out.sequences[0, len(tokens) :].tolist(), (best[:, 0] - best[:, 1]).tolist()


def assert_same_tokens(ours: list[int], theirs: list[int], gaps: list[float]) -> None:
    """Compare token for token. A first difference at a near tie is logged and ends the
    comparison."""
    for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if gaps[at] < NEAR_TIE:
            log.warning("near tie at token %d: the best two are %.2g apart", at, gaps[at])
            if mine != other:
                return
        assert mine == other, f"token {at}: {ours} is not {theirs}"
