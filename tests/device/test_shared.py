"""Rows with a common prefix read it once, and give the same tokens as alone."""

import numpy as np
import pytest
import torch

from headwater.device import native
from headwater.device.attention.shared import attend_shared, shared_tokens
from headwater.device.host_ops import TorchOps
from headwater.device.model import LoadedModel
from headwater.device.spans import SpanLengths
from tests.device.driver import Driver
from tests.device.families import prompt

PREFIX = 128


@pytest.mark.parametrize("shared", [0, 6])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_two_parts_equal_one_softmax_over_all(
    shared: int, masked: bool, compiled: bool
) -> None:
    """Shared and own scores form one softmax, so nothing is approximated."""
    random = torch.Generator().manual_seed(0)
    buffers, kv_heads, queries, others, head_dim = 3, 2, 4, 5, 8
    ops = native.load() if compiled else TorchOps()
    assert ops is not None, "the tests need a C compiler"

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    grouped = made(buffers * kv_heads, queries, head_dim)
    prefix = made(kv_heads, shared, head_dim), made(kv_heads, shared, head_dim)
    own = made(buffers * kv_heads, others, head_dim), made(buffers * kv_heads, others, head_dim)
    lengths = torch.tensor([5, 3, 4] if masked else [5, 5, 5])
    spans = SpanLengths(lengths, width=others, kv_heads=kv_heads)

    ours = attend_shared(ops, grouped, prefix, own, spans)

    keys, values = (
        torch.cat((p.repeat(buffers, 1, 1), o), dim=1) for p, o in zip(prefix, own, strict=True)
    )
    scores = grouped @ keys.transpose(1, 2)
    mask = spans.mask(torch.float32)
    scores[..., shared:] += 0.0 if mask is None else mask
    torch.testing.assert_close(ours, scores.softmax(-1) @ values)


def test_only_a_worthwhile_prefix_is_shared() -> None:
    """A prefix is shared if it has whole blocks before every row's own token, in many rows, and
    is a large part of them."""
    tables = np.tile(np.arange(10), (8, 1))
    tables[:, 9] += np.arange(8)
    contexts = np.full(8, 155)

    assert shared_tokens(tables, contexts, 16) == 144
    assert shared_tokens(tables, np.full(8, 144), 16) == 128, "a row's own token is its own"
    assert shared_tokens(tables[:7], contexts[:7], 16) == 0, "too few rows"
    assert shared_tokens(tables[:, 5:], contexts, 16) == 0, "too few tokens"
    assert shared_tokens(tables, np.array([155] * 7 + [900]), 16) == 0, "too small a part"
    tables[3, 0] = 99
    assert shared_tokens(tables, contexts, 16) == 0, "another first block"


@pytest.mark.slow
def test_rows_of_one_prefix_give_the_tokens_they_give_alone(llama: LoadedModel) -> None:
    """Eight rows of different lengths share their first eight blocks; some leave early."""
    system = prompt(PREFIX, seed=9)
    prompts = [np.concatenate((system, prompt(5 + 3 * i, seed=i))) for i in range(8)]
    driver, alone = (
        Driver(llama, num_blocks=128),
        Driver(llama, num_blocks=128, contiguous_bytes=0),
    )
    first = driver.add(prompts[0], name="0")
    driver.step((first, len(prompts[0])))
    blocks = first.slots[: PREFIX // 16]
    rows = [first] + [
        driver.add(tokens, name=str(i), shared=blocks) for i, tokens in enumerate(prompts) if i
    ]

    driver.finish(*rows, count=8)
    driver.finish(*rows[::2], count=12)

    for row, tokens in zip(rows, prompts, strict=True):
        expected = alone.add(tokens, name=row.name)
        alone.finish(expected, count=len(row.output))
        assert row.output == expected.output
        alone.free(expected)
