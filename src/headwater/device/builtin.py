"""Models generated from a seed, without a download: random weights and a byte-level tokenizer.

The same seed makes the same bytes on every machine: weights come from numpy's generator,
whose stream is fixed, and are written without torch, so this module imports without it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headwater.native.folder import cache_folder, filled_whole

_SPECIALS = (
    "<|begin|>",
    "<|end|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|pad|>",
    "<|spare|>",
)
"""Ids 256 and up; the ids below are the bytes themselves."""

_CHAT_TEMPLATE = (
    "{% if tools %}<|system|>You may call these functions:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Write a call as <tool_call>\n{"name": …, "arguments": …}\n</tool_call><|end|>{% endif %}'
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}"
    "{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    "<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
"""Tools, calls and reasoning in the Hermes format. `</think>` ends the reasoning."""

_VERSION = 2  # part of the folder's name, so that a changed recipe does not use old files
_BYTES = 256
_BEGIN, _END, _PAD = 256, 257, 262


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The sizes of a Llama model; the defaults are those of the built-in tiny model."""

    layers: int = 4
    hidden: int = 256
    ffn: int = 704
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    vocab: int = _BYTES + len(_SPECIALS)
    max_positions: int = 32768


_BENCH_SHAPE = LlamaShape(
    layers=12, hidden=768, ffn=2048, heads=12, kv_heads=4, head_dim=64, vocab=32000
)
"""About 100 million weights: what the benchmarks serve."""


def ensure() -> Path:
    """The folder of the built-in tiny model; created on first use."""
    return ensure_model("tiny", LlamaShape())


def ensure_bench() -> Path:
    """The folder of the ~100 M model of the benchmarks; created on first use."""
    return ensure_model("bench-100m", _BENCH_SHAPE)


def ensure_model(name: str, shape: LlamaShape, *, seed: int = 0) -> Path:
    """A generated model in the user's cache folder. Several processes may call it at once."""
    target = cache_folder() / "models" / f"{name}-v{_VERSION}"
    if not target.is_dir():
        with filled_whole(target) as draft:
            make_llama(draft, shape, seed=seed)
    return target


def make_llama(folder: Path, shape: LlamaShape | None = None, *, seed: int = 0) -> Path:
    """Write a random Llama of `shape` and its tokenizer into `folder`, and return it."""
    shape = shape or LlamaShape()
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(shape))
    _write_json(
        folder / "generation_config.json", {"eos_token_id": _END, "bos_token_id": _BEGIN}
    )
    save_file(_weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(shape.vocab).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(shape))
    return folder


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config(shape: LlamaShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": _BEGIN,
        "eos_token_id": _END,
        "pad_token_id": _PAD,
        "torch_dtype": "float32",
    }


def _weights(shape: LlamaShape, seed: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)

    def normal(rows: int, columns: int) -> NDArray[np.float32]:
        # The inner product of a row with a unit-variance input has unit variance, so that
        # signals neither vanish nor explode over the layers.
        values = random.standard_normal((rows, columns), dtype=np.float32)
        values *= np.float32(columns**-0.5)
        return values

    ones = np.ones(shape.hidden, dtype=np.float32)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": normal(shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = ones
        weights[at + "post_attention_layernorm.weight"] = ones
        weights[at + "self_attn.q_proj.weight"] = normal(queries, shape.hidden)
        weights[at + "self_attn.k_proj.weight"] = normal(keys, shape.hidden)
        weights[at + "self_attn.v_proj.weight"] = normal(keys, shape.hidden)
        weights[at + "self_attn.o_proj.weight"] = normal(shape.hidden, queries)
        weights[at + "mlp.gate_proj.weight"] = normal(shape.ffn, shape.hidden)
        weights[at + "mlp.up_proj.weight"] = normal(shape.ffn, shape.hidden)
        weights[at + "mlp.down_proj.weight"] = normal(shape.hidden, shape.ffn)
    weights["model.norm.weight"] = ones
    return weights


def _tokenizer(vocab_size: int) -> Tokenizer:
    """Maps bytes to ids one to one. Ids after the special tokens are words that are only
    decoded."""
    vocab = {sign: byte for byte, sign in enumerate(_byte_signs())}
    vocab |= {special: _BYTES + i for i, special in enumerate(_SPECIALS)}
    vocab |= {f"Ġw{number}": number for number in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in _SPECIALS])
    return tokenizer


def _byte_signs() -> list[str]:
    """The printable character for each byte in byte-level vocabularies.

    Printable Latin-1 bytes map to themselves; the others, in order, to the characters from 256
    on.
    """
    themselves = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in themselves else next(others)) for byte in range(_BYTES)]


def _tokenizer_config(shape: LlamaShape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIALS[0],
        "eos_token": _SPECIALS[1],
        "pad_token": _SPECIALS[6],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_positions,
        "chat_template": _CHAT_TEMPLATE,
    }
