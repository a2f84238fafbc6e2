"""When a replay says that the machines cannot serve the trace."""

import pytest

from headwater.replay.report import only_grew


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ([float(n) for n in range(100)], True),
        ([float(n) for n in range(80)] + [40.0, 0.0], True),
        ([float(n % 40) for n in range(120)], False),
        ([0.0] * 90 + [100.0] * 10, False),
        ([float(n) for n in range(50)] + [0.0] * 150, False),
        ([5.0] * 100, False),
        ([0.0] * 100, False),
        ([], False),
    ],
    ids=[
        "grows",
        "is worked off at the end",
        "waves",
        "burst",
        "early",
        "level",
        "empty",
        "none",
    ],
)
def test_a_queue_that_only_grew_is_an_overload(waiting, expected):
    """A burst, waves or a level queue are not: the machines catch up with those."""
    assert only_grew(waiting) is expected
