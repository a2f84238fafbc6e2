"""Traits of a run of blocks that predict when it is used again, in buckets.

The traits of a run are one number, so that its class is found with one lookup.
"""

from bisect import bisect_right
from enum import IntEnum

from headwater.cache.policy.base import Hint
from headwater.cache.policy.hazard import GROUP_ENDS

_USES = (1, 2, 3, 4, 6, 10)
_TURNS = (1, 2, 3, 4, 6, 9)
_GROWTHS = (0, 100, 300, 600, 1_000, 2_000, 4_000, 8_000)
_OUTPUTS = (2, 5, 20, 50, 100, 200, 400, 800)
_NUM_GROWTHS = len(_GROWTHS) + 2
_NUM_OUTPUTS = len(_OUTPUTS) + 1
_HALF_OUTPUTS = _NUM_OUTPUTS // 2 + 1

_TRUNK, _PARTIAL, _PARTIAL_AGAIN, _FIRST_USE = range(4)
_NUM_KINDS = _FIRST_USE + len(_USES)

# Feature 0 means "none". Each trait has a range; so has each pair (kind, growth) and (kind,
# output).
_TURN = 1 + _NUM_KINDS
_RELATION = _TURN + len(_TURNS)
_GROWTH = _RELATION + 3
_OUTPUT = _GROWTH + _NUM_GROWTHS
_BY_GROWTH = _OUTPUT + _NUM_OUTPUTS
_BY_OUTPUT = _BY_GROWTH + len(_USES) * _NUM_GROWTHS
_HINT = _BY_OUTPUT + len(_USES) * _HALF_OUTPUTS
_NO_HINT, _PENDING, _FIRST_RETURN = range(3)
_NUM_HINTS = _FIRST_RETURN + len(GROUP_ENDS) + 1
NUM_FEATURES = _HINT + _NUM_HINTS - 1
NUM_UNHINTED = 7
"""Maximum number of features of one run without a hint; a hint adds one."""

PRIORS = {
    _HINT: {0: 2.0},
    **{
        _HINT + 1 + k: {0: 1.0, 1 + k: 2.0} | dict.fromkeys(range(1, 1 + k), -2.0)
        for k in range(len(GROUP_ENDS) + 1)
    },
}
"""Initial weights of hints, by feature and column: "pending" makes a return more likely at
every age; "expected" makes it more likely at the ages it names and less likely before. Learning
changes them later.
"""


class Relation(IntEnum):
    """How a request continues the previous request that used the same prefix."""

    FIRST = 0
    CONTINUES = 1
    """The request contains the whole prompt of the previous one."""

    BRANCHES = 2


class Traits:
    """What the runs of one request have in common; each run then adds its kind."""

    __slots__ = ("_base",)

    def __init__(
        self,
        turn: int,
        relation: Relation,
        growth: int | None,
        output_tokens: int,
        hint: Hint | None = None,
    ) -> None:
        turns = bisect_right(_TURNS, turn) - 1 + _hint_number(hint) * len(_TURNS)
        grown = _NUM_GROWTHS - 1 if growth is None else bisect_right(_GROWTHS, growth)
        outputs = bisect_right(_OUTPUTS, output_tokens)
        number = ((turns * 3 + relation) * _NUM_GROWTHS + grown) * _NUM_OUTPUTS + outputs
        self._base = number * _NUM_KINDS

    def trunk(self) -> int:
        """Traits of a run with which many sessions begin, whatever else is known about it."""
        return _TRUNK

    def partial(self, *, again: bool) -> int:
        """Traits of a last piece that is not full; `again` if the whole prompt was used
        before."""
        return _PARTIAL_AGAIN if again else _PARTIAL

    def used(self, times: int) -> int:
        """Traits of a run that was used this many times, this request included."""
        return self._base + _FIRST_USE - 1 + bisect_right(_USES, times)


def features_of(traits: int) -> tuple[int, ...]:
    """The features that are set for a run with these traits."""
    number, kind = divmod(traits, _NUM_KINDS)
    if kind < _FIRST_USE:
        return (1 + kind,)
    number, output = divmod(number, _NUM_OUTPUTS)
    number, growth = divmod(number, _NUM_GROWTHS)
    number, relation = divmod(number, 3)
    hint, turn = divmod(number, len(_TURNS))
    use = kind - _FIRST_USE
    hinted = () if hint == _NO_HINT else (_HINT + hint - 1,)
    return (
        1 + kind,
        _TURN + turn,
        _RELATION + relation,
        _GROWTH + growth,
        _OUTPUT + output,
        _BY_GROWTH + use * _NUM_GROWTHS + growth,
        _BY_OUTPUT + use * _HALF_OUTPUTS + output // 2,
        *hinted,
    )


def _hint_number(hint: Hint | None) -> int:
    """The bucket of the time of return that a hint gives. A hint that closes the session counts
    as no hint here, because closed runs have a fixed class."""
    if hint is None or hint.closed:
        return _NO_HINT
    if hint.returns_in_s is None:
        return _PENDING
    return _FIRST_RETURN + bisect_right(GROUP_ENDS, hint.returns_in_s)


UNKNOWN = Traits(1, Relation.FIRST, None, 0).used(1)
"""Traits of a run that no finished request has marked."""
