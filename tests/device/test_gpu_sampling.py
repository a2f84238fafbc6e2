"""The sampling kernels choose the same tokens as the CPU sampler, with the right
frequencies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headwater.device.sampler import LogprobTable, SampledRows, Sampler
from headwater.engine.masks import StepMasks
from headwater.scheduler.batch import ScheduledBatch
from headwater.scheduler.request import SamplingParams
from headwater.types import RequestId, Tokens
from tests.device.gpu import pytestmark, require_gpu

require_gpu()

from headwater.device.gpu.sampling import DeviceSampler  # noqa: E402 - it imports Triton

__all__ = ["pytestmark"]

EOS = (5, 6)
PROMPT = 4


def batch_of(
    params: list[SamplingParams], histories: Sequence[Tokens], *, step: int = 0
) -> ScheduledBatch:
    """A decode step of these rows; a history's first `PROMPT` tokens are the prompt."""
    count = len(params)
    lengths = np.array([len(history) for history in histories], dtype=np.int32)
    return ScheduledBatch(
        step=step,
        request_ids=[RequestId(str(row)) for row in range(count)],
        tokens=np.zeros(count, dtype=np.int32),
        positions=lengths - 1,
        query_start=np.arange(count + 1, dtype=np.int32),
        context_lens=lengths,
        block_tables=[np.zeros(1, dtype=np.int64)] * count,
        sampled=np.arange(count, dtype=np.int32),
        params=params,
        histories=[(history, PROMPT) for history in histories],
        carry=np.full(count, -1, dtype=np.int32),
    )


def never(row: int) -> Tokens:
    raise AssertionError("the step before was waited for")


def choose(logits: Tensor, params: list[SamplingParams], histories: Sequence[Tokens]) -> Any:
    """Tokens and log-probabilities by the kernels; greedy rows are chosen by torch."""
    chosen = logits.nan_to_num(nan=-1e30, posinf=-1e30).argmax(-1).int()
    sampler = DeviceSampler(chosen, logits.shape[1], EOS, dtype=logits.dtype)
    places = np.arange(len(params), dtype=np.int32)
    found = sampler.run(batch_of(params, histories), logits, places, None, never)
    torch.cuda.synchronize()
    return chosen.cpu(), found.read()


def reference(
    logits: Tensor, params: list[SamplingParams], histories: Sequence[Tokens]
) -> tuple[Tensor, list[Any]]:
    rows = SampledRows(
        params=params,
        positions=np.array([len(history) for history in histories]),
        prompt_lens=[PROMPT] * len(params),
        histories={row: (history, PROMPT) for row, history in enumerate(histories)},
    )
    chosen = Sampler(EOS).pick(logits, rows)
    return chosen.int(), LogprobTable(logits, chosen, [p.logprobs for p in params]).read()


def random_params(random: np.random.Generator, vocab: int) -> SamplingParams:
    penalties = bool(random.random() < 0.4)
    return SamplingParams(
        max_tokens=64,
        min_tokens=int(random.choice([0, 0, 40])),
        temperature=float(random.choice([0.0, 0.3, 1.0, 1.7])),
        top_p=float(random.choice([1.0, 0.95, 0.4])),
        top_k=int(random.choice([0, 0, 1, 7, 50, 10 * vocab])),
        min_p=float(random.choice([0.0, 0.0, 0.05, 0.5])),
        repetition_penalty=1.3 if penalties else 1.0,
        presence_penalty=0.7 if penalties else 0.0,
        frequency_penalty=0.4 if penalties else 0.0,
        logit_bias={int(random.integers(vocab)): 5.0} if random.random() < 0.3 else {},
        seed=int(random.integers(1 << 60)),
        logprobs=[None, 0, 5, 20][int(random.integers(4))],
        stop_token_ids=(1, 2, vocab + 9),
        ignore_eos=bool(random.random() < 0.5),
    )


@pytest.mark.parametrize("vocab", [40, 1000, 32_000, 128_256])
@pytest.mark.parametrize("scale", [0.3, 4.0])
def test_tokens_equal_the_cpu_sampler(vocab: int, scale: float) -> None:
    """With any mixture of settings in one batch, the same logits and seeds give the same
    tokens."""
    random = np.random.default_rng(vocab)
    logits = torch.randn(96, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
    params = [random_params(random, vocab) for _ in range(96)]
    histories = [random.integers(0, vocab, 24).astype(np.int32) for _ in range(96)]

    chosen, logprobs = choose(logits.cuda(), params, histories)

    expected, their_logprobs = reference(logits, params, histories)
    assert chosen.tolist() == expected.tolist()
    for ours, theirs in zip(logprobs, their_logprobs, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.top_ids == theirs.top_ids
            # Two logits may have one log-probability, and then one rank on the CPU.
            assert abs(ours.rank - theirs.rank) <= 2
            assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-4)
            assert ours.top_values == pytest.approx(theirs.top_values, abs=1e-4)


def test_tokens_in_bfloat16_equal_the_cpu_sampler() -> None:
    """Logits of two bytes have many ties: equally likely tokens are kept or dropped together."""
    random = np.random.default_rng(1)
    logits = torch.randn(128, 50_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    params = [replace(random_params(random, 50_000), logprobs=None) for _ in range(128)]
    histories = [random.integers(0, 50_000, 24).astype(np.int32) for _ in range(128)]

    chosen, _ = choose(logits.cuda(), params, histories)

    assert chosen.tolist() == reference(logits, params, histories)[0].tolist()


FILTERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "temperature": ({"temperature": 0.7}, list(range(8))),
    "top-k": ({"top_k": 3}, [0, 1, 2]),
    "top-p": ({"top_p": 0.8}, [0, 1, 2]),
    "min-p": ({"min_p": 0.3}, [0, 1]),
    "top-k, then top-p": ({"top_k": 4, "top_p": 0.7}, [0, 1]),
}


@pytest.mark.parametrize("name", list(FILTERS))
def test_draws_follow_the_distribution(name: str) -> None:
    """Over many positions each token is drawn as often as its probability, and no other."""
    asked, kept = FILTERS[name]
    count, vocab = 512, 300
    values = torch.full((vocab,), -1e9)
    values[torch.arange(8) * 37] = torch.tensor([2.0, 1.2, 0.4, 0.0, -0.4, -0.8, -1.2, -1.6])
    often = np.zeros(vocab)
    for turn in range(40):
        params = [SamplingParams(**asked, seed=turn * count + row) for row in range(count)]
        histories = [np.zeros(8, dtype=np.int32)] * count
        chosen, _ = choose(values.repeat(count, 1).cuda(), params, histories)
        often += np.bincount(chosen.numpy(), minlength=vocab)

    temperature = asked.get("temperature", 1.0)
    expected = torch.zeros(vocab)
    expected[torch.tensor(kept) * 37] = (values[torch.tensor(kept) * 37] / temperature).softmax(
        -1
    )
    assert often / often.sum() == pytest.approx(expected.numpy(), abs=0.015)


@pytest.mark.parametrize("is_edited", [True, False])
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
    row: list[float],
    expected: int,
    temperature: float,
    is_edited: bool,
) -> None:
    """A broken row is greedy over its finite logits; other rows are not affected."""
    logits = torch.tensor([row, [0.0, 9.0, 1.0, 2.0]], device="cuda")
    params = SamplingParams(
        temperature=temperature,
        top_k=3,
        top_p=0.9,
        min_p=0.01,
        logprobs=2,
        logit_bias={3: 0.0} if is_edited else {},
    )
    sound = SamplingParams(temperature=0.0)

    chosen, logprobs = choose(logits, [params, sound], [np.zeros(6, dtype=np.int32)] * 2)

    assert chosen.tolist() == [expected, 1]
    assert all(value <= 0 for value in (logprobs[0].chosen, *logprobs[0].top_values))


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.001},
        {"temperature": 100.0},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0},
        {"top_p": 1e-45},
        {"top_p": 0.9999999},
        {"min_p": 1.0},
        {"top_k": 39},
    ],
)
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e37])
def test_the_bounds_of_each_parameter_choose_the_token_of_the_cpu(
    asked: dict[str, Any], scale: float
) -> None:
    """Settings at their limits choose the token of the CPU, with equal logits and with logits
    near the largest float."""
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(3)) * scale
    params = [SamplingParams(**asked, seed=4), SamplingParams(**asked, seed=5)]
    histories = [np.arange(6, dtype=np.int32)] * 2

    chosen, _ = choose(logits.cuda(), params, histories)

    assert chosen.tolist() == reference(logits, params, histories)[0].tolist()


def test_counts_are_kept_on_the_device_from_step_to_step() -> None:
    """A penalised row whose last token the host does not know yet needs no host data."""
    vocab, count = 50, 12
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0, repetition_penalty=1.2)
    chosen = torch.zeros(1, dtype=torch.int32, device="cuda")
    sampler = DeviceSampler(chosen, vocab, EOS, dtype=torch.float32)
    history = np.arange(PROMPT, dtype=np.int32)
    expected: list[int] = []
    for step in range(count):
        whole = np.append(history, np.array(expected, dtype=np.int32)).astype(np.int32)
        known = whole[:-1] if step else whole
        batch = batch_of([params], [known], step=step)
        batch.context_lens[:] = len(whole)
        batch.carry[:] = 0 if step else -1

        sampler.run(batch, logits.cuda(), np.zeros(1, dtype=np.int32), None, never)

        expected += reference(logits, [params], [whole])[0].tolist()
        assert chosen.tolist() == expected[-1:]


def test_a_sequence_that_skipped_a_step_is_counted_anew() -> None:
    """The counts of the sequence may include tokens that were dropped, so all its tokens are
    counted again."""
    vocab = 50
    logits = torch.zeros(1, vocab)
    logits[0, 7], logits[0, 8] = 2.0, 1.5
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    chosen = torch.zeros(1, dtype=torch.int32, device="cuda")
    sampler = DeviceSampler(chosen, vocab, EOS, dtype=torch.float32)
    prompt = np.zeros(PROMPT, dtype=np.int32)
    place = np.zeros(1, dtype=np.int32)

    sampler.run(batch_of([params], [prompt], step=0), logits.cuda(), place, None, never)
    first = chosen.tolist()
    sampler.run(batch_of([params], [prompt], step=2), logits.cuda(), place, None, never)

    assert (first, chosen.tolist()) == ([7], [7])


def test_masked_tokens_are_never_chosen() -> None:
    """Rows with a mask get the tokens of the CPU sampler, whatever their other parameters."""
    vocab, count = 1000, 64
    random = np.random.default_rng(5)
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(5)) * 3
    params = [
        replace(random_params(random, vocab), grammar="g" if row % 2 else "", logprobs=None)
        for row in range(count)
    ]
    histories = [random.integers(0, vocab, 24).astype(np.int32) for _ in range(count)]
    words = random.integers(-(2**31), 2**31, (count // 2, 32)).astype(np.int32)
    masks = StepMasks(rows=list(range(1, count, 2)), words=words)
    chosen = logits.argmax(-1).int().cuda()
    sampler = DeviceSampler(chosen, vocab, EOS, dtype=logits.dtype)

    batch, places = batch_of(params, histories), np.arange(count, dtype=np.int32)
    sampler.run(batch, logits.cuda(), places, masks, never)

    rows = SampledRows(
        params=params,
        positions=np.array([24] * count),
        prompt_lens=[PROMPT] * count,
        histories={row: (history, PROMPT) for row, history in enumerate(histories)},
        masks=masks,
    )
    assert chosen.tolist() == Sampler(EOS).pick(logits, rows).tolist()


@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("slow", ["", "forward pass", "masks"])
def test_each_step_samples_with_its_own_masks(slow: str, is_captured: bool) -> None:
    """Masks are sent beside the forward pass. Whether that or the masks take long, no step
    reads those of the step before or after it: each allows one token per row, and other tokens
    and rows in each step."""
    vocab, count, steps, slow_cycles = 128_256, 64, 48, 8_000_000
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(9)).cuda()
    greedy = logits.argmax(-1).int()
    chosen = greedy.clone()
    sampler = DeviceSampler(chosen, vocab, EOS, dtype=logits.dtype)
    if is_captured:
        sampler.capture(logits)
    torch.cuda.synchronize()
    params = [SamplingParams(grammar="g", temperature=0.8, seed=row) for row in range(count)]
    histories = [np.zeros(8, dtype=np.int32)] * count
    places = np.arange(count, dtype=np.int32)
    ended = [torch.cuda.Event() for _ in range(steps)]
    found: list[Tensor] = []
    wanted: list[tuple[Any, Any]] = []
    for step in range(steps):
        if step >= 2:  # two steps are in flight, as with a runner
            ended[step - 2].synchronize()
        rows = np.arange(step % 2, count, 1 + step % 3)
        allowed = (rows * 997 + step * 4_999) % vocab
        words = np.zeros((len(rows), vocab // 32), dtype=np.uint32)
        words[np.arange(len(rows)), allowed // 32] = np.uint32(1) << (allowed % 32).astype(
            np.uint32
        )
        masks = StepMasks(rows=rows.tolist(), words=words.view(np.int32))
        chosen.copy_(greedy)
        if slow == "forward pass":
            torch.cuda._sleep(slow_cycles)
        if slow == "masks":
            with torch.cuda.stream(sampler._masks._stream):
                torch.cuda._sleep(slow_cycles)

        sampler.run(batch_of(params, histories, step=step), logits, places, masks, never)

        found.append(chosen.clone())
        ended[step].record()
        wanted.append((rows, allowed))
    torch.cuda.synchronize()
    for tokens, (rows, allowed) in zip(found, wanted, strict=True):
        assert tokens.cpu().numpy()[rows].tolist() == allowed.tolist()
