"""Decode steps of requests with a JSON schema, compared with unconstrained ones."""

import json
import os
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headwater.bench._gpu_engine import BLOCK_TOKENS, GpuEngine
from headwater.clock import SystemClock
from headwater.engine.grammar import GrammarCompiler
from headwater.engine.masks import MaskWorkers, num_groups_for

PROMPT, OUTPUT = 200, 96
_SKIPPED = 16
_ROUNDS = 3
_END = 256
_LETTERS = 'abcdefghijklmnopqrstuvwxyzĠ0123456789"{}[]:,._-'
_MAX_WORD = 9

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "size": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "size", "tags"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
"""Chosen so that no answer is complete within the output tokens of a request."""


def blocks_for(batch: int) -> int:
    """Device blocks for this many requests."""
    return 2 * batch * (-(-(PROMPT + OUTPUT) // BLOCK_TOKENS) + 1) + 64


def make_masks(vocab_size: int, batch: int) -> MaskWorkers:
    """Mask workers for a vocabulary of this many tokens: bytes, an end token, and words of
    random letters."""
    compiler = GrammarCompiler(
        lambda: vocabulary_json(vocab_size), vocab_size=vocab_size, eos_token_ids=(_END,)
    )
    num_groups = num_groups_for(len(os.sched_getaffinity(0)))
    return MaskWorkers(compiler, SystemClock(), max_states=2 * batch, num_groups=num_groups)


def vocabulary_json(vocab_size: int) -> str:
    """A byte-level tokenizer of `vocab_size` tokens of 1 to 9 bytes, like published ones."""
    random = np.random.default_rng(11)
    signs = pre_tokenizers.ByteLevel.alphabet()
    vocab = {sign: number for number, sign in enumerate(sorted(signs))}
    vocab["<end>"] = _END
    letters = np.array(list(_LETTERS))
    words = letters[random.integers(0, len(letters), (2 * vocab_size, _MAX_WORD))]
    lengths = random.integers(2, _MAX_WORD + 1, len(words))
    for word, length in zip(words, lengths.tolist(), strict=True):
        if len(vocab) == vocab_size:
            break
        vocab.setdefault("".join(word[:length]), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer.to_str()


def measure_json(engine: GpuEngine, batch: int) -> dict[str, Any]:
    """Median steps of unconstrained and constrained requests, in alternating rounds."""
    engine.runner.warm(batch)
    prompts = [engine.prompt(PROMPT, seed=batch * 1_000 + row) for row in range(batch)]
    grammar = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
    bound = [{"grammar": grammar, "temperature": 0.8, "seed": 5}]
    free = [{"temperature": 0.8, "seed": 5}]
    engine.serve(prompts, max_tokens=8, sampling=bound)
    rounds = [
        {
            name: engine.serve(prompts, max_tokens=OUTPUT, sampling=kind)
            for name, kind in (("free", free), ("bound", bound))
        }
        for _ in range(_ROUNDS)
    ]
    found: dict[str, Any] = {}
    for name in ("free", "bound"):
        found[name] = {
            "tokens_s": float(
                np.median([each[name].output_tokens / each[name].seconds for each in rounds])
            ),
            "step_ms": float(
                np.median(
                    [s for each in rounds for s in each[name].steps_s[_SKIPPED:]] or [0.0]
                )
            )
            * 1e3,
        }
    found["bound_of_free"] = found["bound"]["tokens_s"] / found["free"]["tokens_s"]
    return found
