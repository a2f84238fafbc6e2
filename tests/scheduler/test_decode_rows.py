"""Sequences that only decode are handled together; the result is the same as one by one."""

import numpy as np
import pytest

from headwater.scheduler.decode_rows import RECENT_TOKENS
from tests.scheduler.harness import Harness, expected_tokens, make_prompt, make_request


@pytest.mark.parametrize("depth", [1, 2])
def test_sequences_with_and_without_rows_yield_the_same_tokens(depth: int) -> None:
    """Outputs longer than the arrays hold, of requests of all kinds, end as they would alone."""
    requests = [
        make_request("plain", make_prompt(10), max_tokens=3 * RECENT_TOKENS),
        make_request("scored", make_prompt(9, family=1), max_tokens=40, logprobs=0),
        make_request("stops", make_prompt(7, family=2), max_tokens=90, ignore_eos=False),
        make_request("late", make_prompt(12), max_tokens=RECENT_TOKENS + 1),
    ]
    for rows_from in (1, 3, 99):
        harness = Harness(
            num_blocks=200, depth=depth, rows_from=rows_from, settings={"eos_token_ids": (7,)}
        )
        outputs = harness.run(*requests)
        for request in requests:
            assert outputs[request.request_id] == expected_tokens(request, eos=(7,))
        harness.check_empty()


def test_only_sequences_that_report_single_tokens_have_rows() -> None:
    """Log-probabilities and grammars are looked at in every step, so they keep a sequence out."""
    harness = Harness()
    harness.add(
        make_request("plain", make_prompt(10)),
        make_request("scored", make_prompt(9, family=1), logprobs=0),
        make_request("formed", make_prompt(8, family=2), grammar="any"),
    )
    harness.steps(3)

    rows = {s.request_id for s in harness.scheduler._table.decoding if s.has_row}

    assert rows == {"plain"}


def test_few_sequences_get_no_rows() -> None:
    """Below the threshold each sequence is handled on its own; those that have a row keep
    it."""
    harness = Harness(rows_from=3)
    harness.add(*(make_request(n, make_prompt(6, family=int(n)), max_tokens=9) for n in "01"))
    harness.steps(3)
    rows = harness.scheduler._table.rows
    assert len(rows.sequences) == 0

    harness.add(make_request("2", make_prompt(6, family=2), max_tokens=20))
    harness.steps(2)
    assert len(rows.sequences) == 3

    harness.run()
    assert len(rows.sequences) == 0


def test_a_batch_has_the_tokens_known_when_it_was_scheduled() -> None:
    """Histories are read late; steps that were collected meanwhile do not change them."""
    harness = Harness(num_blocks=100)
    request = make_request("a", make_prompt(10), max_tokens=RECENT_TOKENS + 9)
    harness.add(request)
    harness.steps(4)
    batch = harness.batches[3]

    harness.run()

    tokens, num_prompt = batch.histories[0]
    expected = [*make_prompt(10), *expected_tokens(request)[:3]]
    assert (tokens.tolist(), num_prompt) == (expected, 10)
    assert batch.prompt_lens == [10]
    assert [len(tokens) for tokens, _ in batch.histories[:]] == [13]


def test_a_step_reports_plain_tokens_without_an_object_each() -> None:
    """Tokens of sequences that go on are columns; first and last outputs are objects."""
    harness = Harness()
    harness.add(*(make_request(n, make_prompt(6, family=int(n)), max_tokens=4) for n in "01"))

    steps = [harness.step() for _ in range(4)]

    assert [len(outputs.others) for outputs in steps] == [2, 0, 0, 2]
    assert [outputs.request_ids for outputs in steps] == [[], ["0", "1"], ["0", "1"], []]
    assert np.array_equal(steps[1].tokens, [o.tokens[0] for o in steps[1]])
