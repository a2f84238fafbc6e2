"""The checks detect each kind of damage."""

from collections.abc import Callable

import pytest

from headwater.errors import InvariantError
from headwater.scheduler.sequence import Sequence
from tests.scheduler.harness import Harness, make_prompt, make_request

Damage = Callable[[Harness, Sequence], object]


def _lose(harness: Harness, sequence: Sequence) -> None:
    harness.scheduler._table.decoding.remove(sequence)


def _mix_up(harness: Harness, sequence: Sequence) -> None:
    harness.scheduler._table.rows.sequences.clear()


def _steal(harness: Harness, sequence: Sequence) -> None:
    harness.cache.take(1, now=0.0)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_lose, "in no list"),
        (_mix_up, "decode rows"),
        (_steal, "held slots differ"),
        (lambda _, s: setattr(s, "num_computed", 999), "computed more than was scheduled"),
        (lambda _, s: setattr(s, "num_scheduled", 999), "beyond its slots"),
        (lambda _, s: setattr(s, "num_committed", 9), "not computed"),
        (lambda _, s: setattr(s, "num_in_flight", 1), "steps in flight"),
        (lambda _, s: s.note_committed(0), "than its lease"),
        (
            lambda r, s: r.scheduler._table.waiting.push(s),
            "in the list of WAITING but in state DECODE",
        ),
        (lambda r, s: r.scheduler._table.departing.append(s), "has not finished"),
    ],
)
def test_check_finds_damage(damage: Damage, complaint: str) -> None:
    """`check()` detects the violation of each invariant that it names."""
    harness = Harness()
    harness.add(make_request("a", make_prompt(10)))
    harness.steps(2)
    (sequence,) = harness.scheduler._table.decoding

    damage(harness, sequence)

    with pytest.raises(InvariantError, match=complaint):
        harness.scheduler.check()
