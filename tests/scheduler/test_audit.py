"""The checks find what they are for: each kind of damage raises."""

from collections.abc import Callable

import pytest

from headwater.errors import InvariantError
from headwater.scheduler.sequence import Sequence
from tests.scheduler.rig import Rig, make_prompt, make_request

Damage = Callable[[Rig, Sequence], object]


def _lose(rig: Rig, sequence: Sequence) -> None:
    rig.scheduler._table.decoding.remove(sequence)


def _steal(rig: Rig, sequence: Sequence) -> None:
    rig.cache.take(1, now=0.0)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_lose, "lost"),
        (_steal, "the pool says"),
        (lambda _, s: setattr(s, "num_computed", 999), "computed too much"),
        (lambda _, s: setattr(s, "num_scheduled", 999), "beyond its slots"),
        (lambda _, s: setattr(s, "num_committed", 9), "not computed"),
        (lambda _, s: setattr(s, "num_in_flight", 1), "steps in flight"),
        (lambda _, s: s.note_committed(0), "disagrees with its lease"),
        (lambda r, s: r.scheduler._table.waiting.push(s), "waits in another state"),
        (lambda r, s: r.scheduler._table.departing.append(s), "departs alive"),
    ],
)
def test_check_finds_damage(damage: Damage, complaint: str) -> None:
    """`check()` is worth calling: every invariant it names is looked at."""
    rig = Rig()
    rig.add(make_request("a", make_prompt(10)))
    rig.steps(2)
    (sequence,) = rig.scheduler._table.decoding

    damage(rig, sequence)

    with pytest.raises(InvariantError, match=complaint):
        rig.scheduler.check()
