"""The sampler against a simple reference that handles one row at a time."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.device.counter_random import uniform
from headwater.device.sampler import SampledRows, Sampler
from headwater.scheduler.request import SamplingParams

VOCAB = 40
EOS = (5, 6)

PARAMS = st.builds(
    SamplingParams,
    min_tokens=st.sampled_from([0, 0, 3]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.9, 0.4]),
    top_k=st.sampled_from([0, 1, 7, 100]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 3), st.floats(-5, 5), max_size=3),
    seed=st.integers(-(2**70), 2**70),
    logprobs=st.sampled_from([None, 0, 3]),
    stop_token_ids=st.sampled_from([(), (1, 99)]),
    ignore_eos=st.booleans(),
)
HISTORY = st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=12)


def rows_of(params: list[SamplingParams], histories: list[list[int]]) -> SampledRows:
    tokens = [np.array(history, dtype=np.int32) for history in histories]
    return SampledRows(
        params=params,
        positions=np.array([len(history) for history in histories]),
        prompt_lens=[1] * len(params),
        histories={i: (row, 1) for i, row in enumerate(tokens)},
    )


def reference(logits: torch.Tensor, params: SamplingParams, history: list[int]) -> set[int]:
    """The tokens that may be chosen: several if two choices differ only by rounding."""
    values = logits.double().tolist()
    for token in set(history):
        factor = params.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in history[1:]:
        values[token] -= params.frequency_penalty
    for token in set(history[1:]):
        values[token] -= params.presence_penalty
    for token, amount in params.logit_bias.items():
        if token < VOCAB:
            values[token] += amount
    if len(history) - 1 < params.min_tokens:
        for token in params.stop_token_ids + (() if params.ignore_eos else EOS):
            if token < VOCAB:
                values[token] = float("-inf")
    if params.temperature == 0:
        best = max(values)
        return {token for token, value in enumerate(values) if value > best - 1e-5}
    return _drawn(values, params, len(history))


def _drawn(values: list[float], params: SamplingParams, position: int) -> set[int]:
    scaled = np.array(values) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(VOCAB), key=lambda token: -probs[token])
    kept = order[: params.top_k] if params.top_k > 0 else order
    mass, total = 0.0, sum(probs[token] for token in kept)
    top: list[int] = []
    for token in kept:
        if top and mass >= params.top_p * total:
            break
        top.append(token)
        mass += probs[token]
    least = max(min(probs[token] for token in top), params.min_p * probs.max())
    probs = np.where(probs >= least, probs, 0.0)
    cumulative = probs.cumsum()
    at = float(uniform([params.seed], np.array([position]))[0]) * cumulative[-1]
    return {
        int(np.searchsorted(cumulative, at + shift, side="right"))
        for shift in (-1e-5, 0.0, 1e-5)
    } - {VOCAB}


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 5), st.integers(0, 1000))
def test_the_batch_chooses_what_each_row_would(data: Any, num_rows: int, seed: int) -> None:
    """A batch may have any mixture of settings; rows do not affect each other."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB, generator=random) * 3
    params = [data.draw(PARAMS) for _ in range(num_rows)]
    histories = [data.draw(HISTORY) for _ in range(num_rows)]

    chosen, logprobs = Sampler(EOS).choose(logits, rows_of(params, histories))

    for row, asked in enumerate(params):
        assert int(chosen[row]) in reference(logits[row], asked, histories[row])
        alone, _ = Sampler(EOS).choose(
            logits[row : row + 1], rows_of([asked], [histories[row]])
        )
        assert alone[0] == chosen[row], "batching changed the choice"
        _check_logprobs(logits[row], int(chosen[row]), asked.logprobs, logprobs[row])


def _check_logprobs(logits: torch.Tensor, chosen: int, count: int | None, given: Any) -> None:
    if count is None:
        assert given is None
        return
    expected = logits.log_softmax(-1)
    order = expected.argsort(descending=True).tolist()
    assert given.chosen == pytest.approx(float(expected[chosen]), abs=1e-5)
    assert given.rank == order.index(chosen) + 1
    assert list(given.top_ids) == order[:count]
    assert given.top_values == pytest.approx(expected[list(order[:count])].tolist(), abs=1e-5)


def test_the_logits_given_are_left_alone() -> None:
    """Edits are made on a copy: log-probabilities are those of the model."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    params = SamplingParams(temperature=0.0, logit_bias={3: 100.0}, logprobs=1)

    chosen, logprobs = Sampler(EOS).choose(logits, rows_of([params], [[1, 2]]))

    assert chosen.tolist() == [3]
    assert torch.equal(logits, before)
    assert logprobs[0] is not None
    assert logprobs[0].rank > 1


def test_draws_follow_the_distribution() -> None:
    """Over many positions each token is drawn as often as it is likely."""
    count = 20_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    rows = SampledRows(
        params=[SamplingParams(seed=11)] * count,
        positions=np.arange(count),
        prompt_lens=[0] * count,
        histories={},
    )

    chosen, _ = Sampler(()).choose(logits.repeat(count, 1), rows)

    often = np.bincount(chosen, minlength=4) / count
    assert often == pytest.approx(logits.softmax(-1).numpy(), abs=0.01)


def test_min_tokens_lets_an_ignored_end_through() -> None:
    """Only tokens that would end the sequence are forbidden."""
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS[0]] = 9.0

    def choice(**asked: Any) -> int:
        params = SamplingParams(temperature=0.0, min_tokens=4, **asked)
        return int(Sampler(EOS).choose(logits, rows_of([params], [[1, 2]]))[0][0])

    assert choice(ignore_eos=True) == EOS[0]
    assert choice() not in EOS
    assert choice(stop_token_ids=(0,)) not in (0, *EOS)


def test_rows_without_a_history_can_be_drawn() -> None:
    """Only parameters that need earlier tokens use the history."""
    rows = SampledRows(
        params=[SamplingParams(seed=1)], positions=np.array([4]), prompt_lens=[], histories={}
    )

    chosen, _ = Sampler(EOS).choose(torch.zeros(1, VOCAB), rows)

    assert 0 <= int(chosen[0]) < VOCAB


FORBIDDEN = SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=tuple(range(VOCAB)))


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-30, 1.0])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1.0, float("nan"), 3.0, 2.0], 2),
        ([1.0, float("inf"), float("-inf"), 2.0], 3),
        ([float("nan")] * 4, 0),
        ([float("-inf")] * 4, 0),
    ],
)
def test_a_logit_that_is_not_a_number_is_not_chosen(
    row: list[float], expected: int, temperature: float
) -> None:
    """A broken row is greedy over its finite logits; other rows are not affected."""
    logits = torch.tensor([row, [0.0, 9.0, 1.0, 2.0]])
    params = SamplingParams(temperature=temperature, top_k=3, top_p=0.9, min_p=0.01, logprobs=2)
    sound = SamplingParams(temperature=0.0)

    chosen, logprobs = Sampler(EOS).choose(logits, rows_of([params, sound], [[1, 2]] * 2))

    assert chosen.tolist() == [expected, 1]
    assert logprobs[0] is not None
    assert all(value <= 0 for value in (logprobs[0].chosen, *logprobs[0].top_values))


def test_plain_rows_that_are_not_numbers_are_chosen_from_too() -> None:
    """The fast path for an all-greedy batch has the same guarantee."""
    logits = torch.tensor([[1.0, float("nan"), 3.0], [4.0, 5.0, 0.0]])

    chosen, _ = Sampler(EOS).choose(
        logits, rows_of([SamplingParams(temperature=0.0)] * 2, [[1, 2]] * 2)
    )

    assert chosen.tolist() == [2, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_every_token_is_forbidden_the_model_decides(temperature: float) -> None:
    """With `min_tokens` and every token as a stop id, the most likely token is chosen, which
    does not stop yet."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 17] = 1.0

    chosen, _ = Sampler(EOS).choose(
        logits, rows_of([replace(FORBIDDEN, temperature=temperature)], [[1, 2]])
    )

    assert chosen.tolist() == [17]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1e-9},
        {"temperature": 0.001},
        {"temperature": 100.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"top_p": 1e-45},
        {"min_p": 1.0},
        {"logit_bias": dict.fromkeys(range(VOCAB), -100.0)},
    ],
)
def test_the_bounds_of_each_parameter_choose_a_token(asked: dict[str, Any]) -> None:
    """A token is chosen for every value that `SamplingParams` accepts, with logits near the
    largest float."""
    for scale in (1.0, 1e37):
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * scale

        chosen, _ = Sampler(EOS).choose(logits, rows_of([SamplingParams(**asked)], [[1, 2]]))

        assert 0 <= int(chosen[0]) < VOCAB
