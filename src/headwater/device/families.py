"""The model families that are served, and the reasons why others are refused.

A family is on the list only if a test compares its tokens with `generate`. Model code silently
ignores features that our attention does not support, so an unknown family could seem to work
and give wrong results.
"""

from collections.abc import Mapping

from headwater.device.quantization.schemes import METHODS
from headwater.errors import ModelError

SERVED = frozenset(
    {
        "afmoe",
        "arcee",
        "axk1",
        "cohere",
        "cohere2",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granite",
        "granitemoe",
        "granitemoeshared",
        "helium",
        "hunyuan_v1_dense",
        "jais2",
        "llama",
        "longcat_flash",
        "minicpm3",
        "minimax_m2",
        "ministral",
        "mistral",
        "mixtral",
        "nanochat",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "youtu",
    }
)
"""`model_type` of every family that is served."""

NOT_FUSED = frozenset({"longcat_flash"})
"""Families that a GPU runs in transformers' own code, without graphs: a layer of LongCat-Flash has
two attentions, two MLPs and experts beside them. All others run in the fused decoder and in
captured graphs. The decoder is compared with the model's own code at start, and not used if the
two differ."""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Aliases of families that transformers knows by another name."""

_RECURRENT = "keeps a recurrent state, which cannot be shared as blocks of KV"
_ENCODER = "is an encoder-decoder; only decoder-only models are served"
_SPARSE = (
    "selects the tokens it attends to with an indexer, whose keys are not stored in KV blocks"
)
_MEDIA = "is a multimodal model; only its text-only family is served"

_REFUSED = {
    **dict.fromkeys(
        (
            "bamba",
            "falcon_h1",
            "falcon_mamba",
            "granitemoehybrid",
            "jamba",
            "kimi_linear",
            "lfm2",
            "mamba",
            "mamba2",
            "nemotron_h",
            "qwen3_5",
            "qwen3_next",
            "recurrent_gemma",
            "rwkv",
            "xlstm",
            "zamba",
            "zamba2",
        ),
        _RECURRENT,
    ),
    **dict.fromkeys(
        ("bart", "mbart", "mt5", "pegasus", "t5", "t5gemma", "umt5", "whisper"), _ENCODER
    ),
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4", "mistral_large4"),
        _SPARSE,
    ),
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        "attends in chunks that are not passed to the attention function",
    ),
    **dict.fromkeys(
        (
            "gemma3",
            "gemma3n",
            "kimi_k25",
            "llava",
            "mistral4",
            "mllama",
            "qwen2_vl",
            "qwen2_5_vl",
        ),
        _MEDIA,
    ),
}

_RECURRENT_KEYS = ("ssm_cfg", "mamba_d_state", "ssm_state_size", "linear_key_head_dim")
_RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "recurrent", "conv"})


def check_served(config: Mapping[str, object]) -> None:
    """Raise ModelError with the reason, unless the model of this config.json is served."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise ModelError(
            "config.json has no model_type, so the model's family is unknown; use a complete model folder"
        )
    reason = _why_not(kind, config)
    if reason is not None:
        raise ModelError(f"model type '{kind}' is not served: it {reason}")
    if ALIASES.get(kind, kind) not in SERVED:
        raise ModelError(
            f"model type '{kind}' is not served: it has not been tested against its own "
            f"generate(); served are {', '.join(sorted(SERVED))}"
        )


def _why_not(kind: str, config: Mapping[str, object]) -> str | None:
    """The reason why a model is not served; None if it is. General reasons come first, because
    they apply to every family."""
    layer_types = config.get("layer_types")
    if config.get("is_encoder_decoder") is True:
        return _ENCODER
    if config.get("index_topk") is not None:
        return _SPARSE
    if any(config.get(key) is not None for key in _RECURRENT_KEYS):
        return _RECURRENT
    if isinstance(layer_types, list) and _RECURRENT_LAYERS.intersection(layer_types):
        return _RECURRENT
    if isinstance(layer_types, list) and "chunked_attention" in layer_types:
        return _REFUSED["llama4"]
    if config.get("use_bidirectional_attention"):
        return "attends to later tokens, so the KV of a prefix depends on the tokens after it"
    return _REFUSED.get(kind) or _quantized(config)


def _quantized(config: Mapping[str, object]) -> str | None:
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None
    method = quantization.get("quant_method")
    if method in METHODS:
        return None
    if method is None:
        return "has a quantization_config that names no quant_method"
    return f"has weights quantised with '{method}'; served are {', '.join(METHODS)}"


def max_positions(config: Mapping[str, object], rope: Mapping[str, object]) -> int:
    """Longest sequence whose KV depends only on its own tokens.

    Under `longrope` the frequencies of *all* sequences in a batch change when one passes
    the original length, so that length is the limit: below it, the KV of a block never changes.
    """
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int) or positions < 1:
        raise ModelError(
            "max_position_embeddings in config.json must be a positive whole number, got "
            f"{positions!r}"
        )
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and isinstance(original, int):
        return min(positions, original)
    return positions
