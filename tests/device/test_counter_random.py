"""Random numbers are a pure function of seed and position."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headwater.device.counter_random import uniform


@given(st.integers(), st.integers(min_value=0, max_value=2**31))
def test_the_same_seed_and_position_give_the_same_number(seed: int, position: int) -> None:
    """One seed and position give one number, alone and in a batch, for any integer seed; the
    number is never 1."""
    alone = uniform([seed], np.array([position]))
    among = uniform([seed + 1, seed, 7], np.array([position, position, 0]))

    assert alone[0] == among[1]
    assert 0.0 <= alone[0] < 1.0


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    """Numbers are uniform over positions and over seeds, without correlation between
    neighbours."""
    count = 20_000
    by_position = uniform([3] * count, np.arange(count))
    by_seed = uniform(range(count), np.zeros(count, dtype=np.int64))

    for drawn in (by_position, by_seed):
        filled = np.histogram(drawn, bins=20, range=(0, 1))[0]
        assert (np.abs(filled - count / 20) < 5 * (count / 20) ** 0.5).all()
        assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.03
