"""The table of sampling parameters: read once, bounded, and correct after it was filled
again."""

import numpy as np

from headwater.device.gpu.sampling_table import SamplingTable
from headwater.scheduler.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


def test_entries_have_what_the_objects_say() -> None:
    """Each object has one entry, in whatever order and however often it is used."""
    table = SamplingTable(8)
    asked = [GREEDY, SamplingParams(temperature=0.5, top_k=7, seed=-1, logprobs=3), GREEDY]

    entries = table.entries(asked)

    assert entries[0] == entries[2] != entries[1]
    assert table.is_plain[entries].tolist() == [True, False, True]
    assert table.floats["temperature"][entries].tolist() == [0.0, 0.5, 0.0]
    assert table.ints["top_k"][entries].tolist() == [0, 7, 0]
    assert table.num_logprobs[entries].tolist() == [-1, 3, -1]
    assert int(table.seeds[entries[1]]) == 2**64 - 1
    assert np.array_equal(table.entries(asked), entries)


def test_the_table_is_bounded() -> None:
    """A full table is filled again with the objects of the step; none is confused."""
    table = SamplingTable(4)
    for step in range(20):
        asked = [SamplingParams(temperature=0.5 + step, top_k=row) for row in range(3)]

        entries = table.entries(asked)

        assert entries.max() < 4
        assert table.floats["temperature"][entries].tolist() == [0.5 + step] * 3
        assert table.ints["top_k"][entries].tolist() == [0, 1, 2]


def test_only_rows_that_ask_for_nothing_are_plain() -> None:
    """A bias, a penalty, a grammar, `min_tokens` or logprobs each need the sampling kernels."""
    table = SamplingTable(16)
    asked = [
        SamplingParams(temperature=0.0, logit_bias={1: 2.0}),
        SamplingParams(temperature=0.0, presence_penalty=0.5),
        SamplingParams(temperature=0.0, grammar="g"),
        SamplingParams(temperature=0.0, min_tokens=2),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=1.0),
    ]

    assert not table.is_plain[table.entries(asked)].any()
    assert table.is_plain[table.entries([GREEDY])].all()


def test_forbidden_ends_override_biases() -> None:
    """An id is listed once, and a forbidden token stays impossible."""
    table = SamplingTable(4)
    params = SamplingParams(logit_bias={5: 3.0, 8: 1.0}, stop_token_ids=(8,), min_tokens=1)
    entry = int(table.entries([params])[0])

    listed = table.edit_list(entry, (5,), forbids_ends=True)
    free = table.edit_list(entry, (5,), forbids_ends=False)

    assert dict(zip(listed.ids.tolist(), listed.amounts.tolist(), strict=True)) == {
        5: float("-inf"),
        8: float("-inf"),
    }
    assert dict(zip(free.ids.tolist(), free.amounts.tolist(), strict=True)) == {5: 3.0, 8: 1.0}
