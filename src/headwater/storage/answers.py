"""Checks what a backend answers. A plug-in may return anything: a wrong answer is a failure of
that one call (StorageError, counted as `bad_answer`), and never reaches the engine loop."""

import operator
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeVar

from headwater.errors import StorageBadAnswer
from headwater.storage.base import StorageStats
from headwater.types import BlockKey

E = TypeVar("E", bound=Enum)


def check_counts(answer: object, runs: Sequence[Sequence[BlockKey]]) -> list[int]:
    """The answer of `contains`: for each run a number of leading keys."""
    items = _items(answer, len(runs), "contains")
    counts = [check_count(item, "contains") for item in items]
    for count, run in zip(counts, runs, strict=True):
        if count > len(run):
            raise StorageBadAnswer(
                f"storage backend: contains answered {count} for a run of {len(run)} keys"
            )
    return counts


def check_count(answer: object, method: str) -> int:
    """One number that is not negative."""
    try:
        count = operator.index(answer)  # type: ignore[arg-type]  # that is what is checked
    except TypeError:
        count = -1
    if isinstance(answer, bool) or count < 0:
        raise StorageBadAnswer(
            f"storage backend: {method} answered {_shown(answer)}, expected a count"
        )
    return count


def check_outcomes(answer: object, kind: type[E], count: int, method: str) -> list[E]:
    """The answer of `read` or `write`: one `kind` for each block."""
    items = _items(answer, count, method)
    for item in items:
        if not isinstance(item, kind):
            raise StorageBadAnswer(
                f"storage backend: {method} answered {_shown(item)}, expected {kind.__name__}"
            )
    return items


def check_stats(answer: object) -> StorageStats:
    """The answer of `stats`."""
    if not isinstance(answer, StorageStats):
        raise StorageBadAnswer(
            f"storage backend: stats answered {_shown(answer)}, expected StorageStats"
        )
    return answer


def _items(answer: object, count: int, method: str) -> list[Any]:
    if not isinstance(answer, list | tuple) or len(answer) != count:
        raise StorageBadAnswer(
            f"storage backend: {method} answered {_shown(answer)}, expected a list of {count}"
        )
    return list(answer)


def _shown(answer: object) -> str:
    try:
        return f"{type(answer).__name__} {answer!r}"[:80]
    except Exception:  # noqa: BLE001 - the object is a plug-in's, and so is its repr
        return type(answer).__name__
