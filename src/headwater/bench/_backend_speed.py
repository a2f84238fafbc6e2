"""Speed of each storage backend against the ceiling of its medium, measured alternately."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headwater.bench._ceilings import (
    Ceiling,
    FileCeiling,
    MemoryCeiling,
    MooncakeCeiling,
    RedisCeiling,
    page_memory,
)
from headwater.bench._storage_media import Media
from headwater.clock import SystemClock
from headwater.storage import BlockFormat, BlockRead, BlockWrite, Opening, open_storage
from headwater.testing.storage import make_keys, make_parents
from headwater.types import BlockKey

_BLOCK_BYTES = 1 << 20
_SLOT_BYTES = _BLOCK_BYTES + 4096
_TIMEOUT_S = 120.0
_WARM_UP = 3
"""Warm-up turns: after them every slot and page has been used before."""

Speeds = dict[str, dict[str, float]]


def measure_backends(media: Media, folder: Path, *, rounds: int, blocks: int) -> dict[str, Any]:
    """Return `backend_ratio` and `backend_mb_s` by backend and direction, from the fastest
    turns. On a disk that other processes use, the fastest turn of a backend and that of its
    ceiling may be from different times, so `backend_ratio_turns` has the quartiles of the
    ratios within each turn."""
    ratios: Speeds = {}
    quartiles: dict[str, dict[str, list[float]]] = {}
    speeds: Speeds = {}
    room = {"capacity_bytes": 2 * blocks * _SLOT_BYTES, "slab_bytes": 2 * blocks * _SLOT_BYTES}
    backends = {
        "memory": {},
        **media,
        "file": {**media["file"], **room, "path": str(folder / "ratio")},
    }
    for name, settings in backends.items():
        pair = _Pair(name, settings, folder, blocks)
        try:
            turns = [pair.turn(number) for number in range(_WARM_UP + rounds)]
        finally:
            pair.close()
        seconds = turns[_WARM_UP:]
        ratios[name], speeds[name], quartiles[name] = {}, {}, {}
        for way in ("write", "read"):
            # A ceiling is the best that the medium can do, so the fastest turn counts, for the
            # backend too.
            ours, bare = (
                min(turn[f"{way} {who}"] for turn in seconds) for who in ("backend", "ceiling")
            )
            ratios[name][way] = bare / ours
            paired = [turn[f"{way} ceiling"] / turn[f"{way} backend"] for turn in seconds]
            quartiles[name][way] = np.percentile(paired, (25, 50, 75)).tolist()
            speeds[name][way] = blocks * _BLOCK_BYTES / 1e6 / ours
            speeds[name][f"{way} ceiling"] = blocks * _BLOCK_BYTES / 1e6 / bare
    return {
        "backend_ratio": ratios,
        "backend_ratio_turns": quartiles,
        "backend_mb_s": speeds,
    }


class _Pair:
    """A backend and the ceiling of its medium, with buffers for both."""

    def __init__(
        self, name: str, settings: dict[str, Any], folder: Path, num_blocks: int
    ) -> None:
        self._clock = SystemClock()
        self._num_blocks = num_blocks
        memory = page_memory(2 * num_blocks * _BLOCK_BYTES)
        views = [memory[at : at + _BLOCK_BYTES] for at in range(0, len(memory), _BLOCK_BYTES)]
        self._blocks, self._into = views[:num_blocks], views[num_blocks:]
        rng = np.random.default_rng(1)
        for block in self._blocks:
            block[:] = rng.bytes(_BLOCK_BYTES)
        form = BlockFormat(fingerprint=bytes(range(32)), block_bytes=_BLOCK_BYTES)
        self._backend = open_storage(name, settings, Opening(format=form, memory=memory))
        self._ceiling = self._make_ceiling(name, settings, folder)

    def turn(self, number: int) -> dict[str, float]:
        """Seconds of the backend and of its ceiling; odd turns measure them in the opposite
        order."""
        keys = make_keys(self._num_blocks, run=f"turn {number}")
        if number % 2:
            return self._bare() | self._ours(keys)
        return self._ours(keys) | self._bare()

    def close(self) -> None:
        self._ceiling.close()
        self._backend.close()

    def _ours(self, keys: Sequence[BlockKey]) -> dict[str, float]:
        began = self._clock.now()
        written = self._backend.write(
            keys, self._blocks, parents=make_parents(keys), timeout_s=_TIMEOUT_S
        )
        between = self._clock.now()
        read = self._backend.read(keys, self._into, timeout_s=_TIMEOUT_S)
        ended = self._clock.now()
        assert set(written) == {BlockWrite.WRITTEN}
        assert set(read) == {BlockRead.READ}
        self._backend.remove(keys, timeout_s=_TIMEOUT_S)
        return {"write backend": between - began, "read backend": ended - between}

    def _bare(self) -> dict[str, float]:
        began = self._clock.now()
        self._ceiling.write(self._blocks)
        between = self._clock.now()
        self._ceiling.read(self._into)
        ended = self._clock.now()
        self._ceiling.forget(self._num_blocks)
        return {"write ceiling": between - began, "read ceiling": ended - between}

    def _make_ceiling(self, name: str, settings: dict[str, Any], folder: Path) -> Ceiling:
        if name == "file":
            return FileCeiling(folder, self._num_blocks, _BLOCK_BYTES)
        if name == "redis":
            return RedisCeiling(settings["url"])
        if name == "mooncake":
            store = self._backend._store  # type: ignore[attr-defined] # the pool it has joined
            return MooncakeCeiling(store)
        return MemoryCeiling(self._num_blocks, _BLOCK_BYTES)
