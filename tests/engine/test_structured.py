"""Structured output on the built-in model: valid answers, and the four equalities with
masks."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from headwater import LLM, SamplingParams, StructuredOutput
from headwater.engine.llm import Completion
from headwater.errors import RequestError
from headwater.scheduler.request import Request
from headwater.types import RequestId
from tests.disagg.real import TOKEN, RealPair

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
PERSON = StructuredOutput(json=SCHEMA)
PROMPTS = [f"{'A long shared beginning of the prompt. ' * 4}Number {n}." for n in range(6)]
PARAMS = SamplingParams(max_tokens=400, seed=5)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(num_blocks_override=400, block_tokens=16, max_num_seqs=8)
    yield made
    made.core.check()
    made.close()


@pytest.fixture(scope="module")
def truth(llm: LLM) -> list[list[int]]:
    """The output of each prompt alone, without a cache."""
    found = []
    for prompt in PROMPTS:
        llm.core.reset_cache()
        found.append(llm.generate(prompt, PARAMS, structured=PERSON)[0].tokens)
    return found


def check_person(answer: Completion) -> None:
    assert answer.finish_reason == "stop"
    person = json.loads(answer.text)
    assert set(person) == set(SCHEMA["properties"])  # type: ignore[call-overload]
    assert 0 <= person["age"] <= 120
    assert person["kind"] in ("cat", "dog")


def test_every_answer_follows_its_schema(llm):
    """Answers follow their schema with greedy and random sampling, with penalties, several
    choices and log-probabilities."""
    for params in (
        PARAMS,
        replace(PARAMS, temperature=0.0),
        replace(PARAMS, presence_penalty=2.0, repetition_penalty=1.3, logprobs=2),
        replace(PARAMS, top_k=3, min_p=0.01, logit_bias={65: 100.0, 257: 100.0}),
    ):
        for answer in llm.generate(PROMPTS, params, structured=PERSON, n=2):
            check_person(answer)


def test_the_grammar_alone_says_when_an_answer_is_complete(llm):
    """`min_tokens` and `ignore_eos` add nothing after the end that the grammar sets."""
    wanted = StructuredOutput(choice=["yes", "no"])
    for params in (replace(PARAMS, min_tokens=50), replace(PARAMS, ignore_eos=True)):
        answer = llm.generate("Well?", params, structured=wanted)[0]
        assert answer.text in ("yes", "no")
        assert answer.finish_reason == "stop"


def test_patterns_choices_and_grammars_are_followed(llm):
    """One answer of each kind follows its constraint."""
    kinds = {
        r"[a-f]{4}/\d{2}": StructuredOutput(regex=r"[a-f]{4}/\d{2}"),
        "left|right": StructuredOutput(choice=["left", "right"]),
        "a+b": StructuredOutput(grammar='start: "a" "a"? "b"'),
        "(ab|c)": StructuredOutput(grammar='root ::= "ab" | "c"'),
    }
    for pattern, wanted in kinds.items():
        for answer in llm.generate(PROMPTS[:3], PARAMS, structured=wanted):
            assert re.fullmatch(pattern, answer.text), (pattern, answer.text)
    answer = llm.generate("x", PARAMS, structured=StructuredOutput(json_object=True))[0]
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.text), dict)


def test_cached_equals_uncached_with_masks(llm, truth):
    """When prompts come again, one by one and all at once, prefixes hit and tokens are the
    same."""
    llm.core.reset_cache()
    for _ in range(2):
        answers = llm.generate(PROMPTS, PARAMS, structured=PERSON)
        assert [answer.tokens for answer in answers] == truth
    assert all(answer.cached_tokens > 0 for answer in answers)


def test_chunked_and_preempted_equal_undisturbed_with_masks(truth):
    """Few blocks and small chunks: rows are preempted, and their masks rebuilt from tokens."""
    llm = LLM(num_blocks_override=40, block_tokens=16, max_num_seqs=6, max_batched_tokens=24)
    answers = llm.generate(PROMPTS, PARAMS, structured=PERSON)
    assert llm.core.stats().num_preemptions > 0
    assert [answer.tokens for answer in answers] == truth
    llm.close()


def test_disaggregated_equals_local_with_masks(monkeypatch, truth, llm):
    """The prefill instance samples the first token with the same grammar."""
    monkeypatch.setenv("HEADWATER_PEER_TOKEN", TOKEN)
    params = replace(PARAMS, grammar=PERSON.to_grammar())
    with RealPair() as pair:
        requests = [
            Request(
                request_id=RequestId(f"r{at}"),
                tokens=llm.tokenizer.encode(prompt),
                params=params,
                arrival_s=0.0,
            )
            for at, prompt in enumerate(PROMPTS[:3])
        ]
        assert pair.serve(*requests) == truth[:3]


def test_a_resumed_response_continues_at_the_state_of_its_grammar(llm, truth):
    """Another instance that gets the first tokens samples the same rest."""
    whole = truth[0]
    cut = len(whole) // 2
    prompt = np.concatenate((llm.tokenizer.encode(PROMPTS[0]), np.array(whole[:cut])))
    request = Request(
        request_id=RequestId("continued"),
        tokens=prompt.astype(np.int32),
        params=replace(PARAMS, grammar=PERSON.to_grammar()),
        arrival_s=0.0,
        num_resumed_tokens=cut,
    )
    llm.core.add(request)
    rest: list[int] = []
    while llm.core.has_work:
        for output in llm.core.step():
            rest += output.tokens
    assert rest == whole[cut:]


def test_a_row_with_a_slow_grammar_delays_no_other_row(llm):
    """Unconstrained rows continue while a grammar is compiled for the first time."""
    slow = StructuredOutput(regex="(a|b|ab){100,200}c{3}(x|y|xy){50,80}").to_grammar()
    params = [replace(PARAMS, grammar=slow, max_tokens=40), replace(PARAMS, max_tokens=40)]
    constrained, free = llm.generate(PROMPTS[:2], params)
    assert set(constrained.text) <= set("ab")
    assert len(free.tokens) > 0


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"json": {"type": "strin"}}, "Invalid type"),
        ({"json": {"type": "object", "if": {}}}, "Unimplemented"),
        ({"json": {"type": "string", "format": "sesame"}}, "Unknown format"),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: nothing"}, "nothing"),
    ],
)
def test_an_unsupported_grammar_is_refused_with_the_message_of_the_library(llm, wanted, words):
    """An answer never ignores a part of its schema."""
    with pytest.raises(RequestError, match=words):
        llm.generate("x", PARAMS, structured=StructuredOutput(**wanted))
    check_person(llm.generate("x", PARAMS, structured=PERSON)[0])


@pytest.mark.parametrize(
    "wanted",
    [
        {},
        {"json": SCHEMA, "regex": "a"},
        {"json": "{"},
        {"json": "[]"},
        {"choice": []},
        {"choice": [""]},
        {"choice": "yes"},
        {"regex": ""},
        {"json": {"enum": ["x" * (1 << 18)]}},
    ],
)
def test_an_invalid_structured_output_is_refused_before_it_is_compiled(wanted):
    """Exactly one field must be set, of the right kind and within the limits."""
    with pytest.raises(RequestError):
        StructuredOutput(**wanted).to_grammar()


def test_a_schema_that_is_nested_too_deeply_is_refused():
    """The depth of a schema is bounded for every function that walks it."""
    schema: dict[str, object] = {}
    for _ in range(100):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="nested"):
        StructuredOutput(json=schema).to_grammar()
