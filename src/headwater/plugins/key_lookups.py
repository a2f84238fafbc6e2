"""Storage lookups for the keys that requests need, in batches, without waiting.

    ask(key) -> None ── flush ──▶ one lookup job ── finish ──▶ ask(key) -> True or False

An answer is kept while one of its requests lives. A key whose block could not be read counts as
absent from then on, so that no request tries it again and again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from headwater.types import BlockKey, JobId


@dataclass(slots=True)
class _Answer:
    present: bool | None = None
    """None until storage has answered."""

    requests: set[str] = field(default_factory=set)


class KeyLookups:
    """The answers of storage, by key. It has only the keys of living requests and of lookups in
    flight."""

    def __init__(self) -> None:
        self._answers: dict[bytes, _Answer] = {}
        self._keys: dict[str, set[bytes]] = {}
        """Keys that each living request has asked for."""
        self._batch: dict[bytes, BlockKey] = {}
        self._asked: dict[JobId, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def ask(self, key: bytes, request: str, stored_as: BlockKey) -> bool | None:
        """Whether storage has `key`; None while that is not known yet."""
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = _Answer()
            self._batch[key] = stored_as
        answer.requests.add(request)
        self._keys.setdefault(request, set()).add(key)
        return answer.present

    def take_batch(self) -> dict[bytes, BlockKey]:
        """The keys to look up now, with their names in storage."""
        batch, self._batch = self._batch, {}
        return batch

    def start(self, job: JobId, keys: Iterable[bytes]) -> None:
        """Note that `job` looks up these keys."""
        self._asked[job] = list(keys)

    def finish(self, job: JobId, found: tuple[int, ...]) -> bool:
        """Record the answers of `job`; `found` is empty if it failed. Returns False if `job` is
        not a lookup of this object."""
        keys = self._asked.pop(job, None)
        if keys is None:
            return False
        counts = found or (0,) * len(keys)
        for key, count in zip(keys, counts, strict=True):
            answer = self._answers.get(key)
            if answer is not None and answer.present is None:
                answer.present = bool(count)
                self._drop_unused(key, answer)
        return True

    def mark_absent(self, keys: Iterable[bytes]) -> None:
        """Record that blocks could not be read: they are absent for all living requests."""
        for key in keys:
            if key in self._answers:
                self._answers[key].present = False

    def forget(self, request: str) -> None:
        """Forget a request that has ended, and answers that no other request needs."""
        for key in self._keys.pop(request, ()):
            answer = self._answers[key]
            answer.requests.discard(request)
            if key in self._batch and not answer.requests:
                del self._batch[key]
                answer.present = False
            self._drop_unused(key, answer)

    def _drop_unused(self, key: bytes, answer: _Answer) -> None:
        # A key in flight stays: a new request may use its answer.
        if not answer.requests and answer.present is not None:
            del self._answers[key]
