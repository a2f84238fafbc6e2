"""Engines with host and storage tiers for tests: warm ones, ones that write everything, and
storage that fails at random."""

from collections.abc import Callable
from typing import Any

from headwater.errors import StorageError
from headwater.storage.base import StorageBackend
from headwater.storage.codec import BlockFormat
from headwater.storage.memory import MemoryConfig, MemoryStorage
from headwater.types import WritePolicy
from tests.scheduler.harness import Harness, make_prompt, make_request

PROMPT = make_prompt(33)


class FaultyStorage(MemoryStorage):
    """Loses, damages and refuses blocks at random: a roll below 0.2 is a fault."""

    roll: Callable[[], float]

    def contains(self, runs, *, timeout_s):
        self._fail("contains")
        return super().contains(runs, timeout_s=timeout_s)

    def read(self, keys, into, *, timeout_s):
        self._fail("read")
        for key in keys:
            roll = self.roll()
            if roll < 0.1:
                self.values.pop(key, None)
            elif roll < 0.2 and key in self.values:
                value = bytearray(self.values[key])
                value[int(roll * 1e6) % len(value)] ^= 1
                self.values[key] = value
        return super().read(keys, into, timeout_s=timeout_s)

    def write(self, keys, blocks, *, parents, timeout_s):
        self._fail("write")
        return super().write(keys, blocks, parents=parents, timeout_s=timeout_s)

    def _fail(self, what):
        if self.roll() < 0.15:
            raise StorageError(f"{what} failed")


def make_faulty(roll: Callable[[], float], block_tokens: int = 4) -> FaultyStorage:
    form = BlockFormat(fingerprint=bytes(32), block_bytes=8 * block_tokens)
    storage = FaultyStorage(MemoryConfig(), form)
    storage.roll = roll
    return storage


def never() -> float:
    return 1.0


def always() -> float:
    return 0.0


def warm(harness: Harness, prompt: list[int], *, rounds: int = 2) -> None:
    """Serve `prompt` until the host has it, then evict it from the device."""
    for number in range(rounds):
        harness.run(make_request(f"warm{number}", prompt, max_tokens=1))
    for family in range(5, 9):
        harness.run(
            make_request(f"crowd{family}", make_prompt(60, family=family), max_tokens=1)
        )


def make_through(storage: StorageBackend, **options: Any) -> Harness:
    """An engine that writes everything it computes to the host and to `storage`."""
    whole: dict[str, Any] = {"num_blocks": 16, "host_blocks": 64, "stored": storage}
    return Harness(**(whole | {"write_policy": WritePolicy.WRITE_THROUGH} | options))


def make_warm(**options: Any) -> Harness:
    """An engine whose host has the 8 full blocks of `PROMPT` and whose device has none."""
    harness = Harness(num_blocks=17, host_blocks=64, **options)
    warm(harness, PROMPT)
    return harness
