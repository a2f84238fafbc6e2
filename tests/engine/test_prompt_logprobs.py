"""Log-probabilities of prompt tokens. Cached blocks, chunks and other rows of the batch do not
change them."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from headwater import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, logprobs=3, ignore_eos=True)
SCORED = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3, ignore_eos=True)
PROMPT = list(b"The water comes from the mountains, where snow melts in the spring. " * 3)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM(num_blocks_override=200, block_tokens=16, max_num_seqs=8)
    yield made
    made.core.check()
    made.close()


@pytest.fixture(scope="module")
def truth(llm: LLM) -> tuple[list[int], list[float]]:
    """A prompt, and the log-probability of each of its last tokens when it was sampled."""
    answer = llm.generate(PROMPT, GREEDY)[0]
    chosen = [entry.chosen for entry in answer.logprobs if entry is not None]
    return PROMPT + answer.tokens, chosen


def check(scored, truth: tuple[list[int], list[float]]) -> None:
    tokens, chosen = truth
    entries = scored.prompt_logprobs
    assert len(entries) == len(tokens) - 1
    assert [entry.chosen for entry in entries[-len(chosen) :]] == pytest.approx(
        chosen, abs=1e-3
    )
    for entry, token in zip(entries[-len(chosen) :], tokens[-len(chosen) :], strict=True):
        assert entry.rank == 1
        assert entry.top_ids[0] == token
        assert len(entry.top_ids) == 3


def test_prompt_logprobs_equal_those_of_sampling(llm, truth):
    """Although the whole prompt is cached, it is computed again for its log-probabilities."""
    llm.core.reset_cache()
    for _ in range(2):
        scored = llm.generate(truth[0], SCORED)[0]
        check(scored, truth)
        assert scored.cached_tokens == 0
    plain = llm.generate(truth[0], replace(SCORED, prompt_logprobs=None))[0]
    assert plain.cached_tokens > 0
    assert plain.prompt_logprobs is None
    assert plain.tokens == scored.tokens


def test_chunks_neighbours_and_preemption_change_nothing(truth):
    """The prompt is computed in small chunks together with other rows, in a pool that is too
    small for all."""
    llm = LLM(num_blocks_override=48, block_tokens=16, max_num_seqs=6, max_batched_tokens=40)
    params = [SCORED, replace(GREEDY, max_tokens=150), replace(SCORED, max_tokens=100)]
    for _ in range(2):
        scored, _, longer = llm.generate([truth[0], PROMPT, truth[0]], params)
        check(scored, truth)
        check(longer, truth)
    llm.core.check()
    llm.close()


def test_a_prompt_of_one_token_has_none(llm):
    """Nothing predicts the first token."""
    assert llm.generate([65], SCORED)[0].prompt_logprobs == []
