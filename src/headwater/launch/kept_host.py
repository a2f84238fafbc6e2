"""A host tier in memory of the supervisor: a new engine adopts the blocks that the last one
left there."""

import logging
import mmap
import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headwater.cache import AdoptedRun, KeyScheme, Namespace, TieredCache, TransferJob
from headwater.clock import Clock
from headwater.errors import ConfigError
from headwater.transfer.slab import HostSlab, slot_bytes
from headwater.transfer.slot_directory import (
    DirectoryShape,
    SlotDirectory,
    SlotRecord,
    read_shape,
)
from headwater.transfer.workers import Plan
from headwater.types import BlockKey, Tier

log = logging.getLogger(__name__)


class KeptHost:
    """The two files of the supervisor: the bytes of blocks, and the slot records."""

    def __init__(self, blocks: int, directory: int) -> None:
        """`blocks` and `directory` are descriptors."""
        self._blocks = blocks
        self._directory = directory

    def num_blocks(self, identity: bytes, block_bytes: int) -> int | None:
        """Size of the existing tier in blocks. If there is none, or one of another model or
        format, its memory is freed and None is returned."""
        shape = read_shape(self._directory)
        if shape is not None and (shape.identity, shape.block_bytes) == (identity, block_bytes):
            return shape.num_slots
        os.ftruncate(self._directory, 0)
        os.ftruncate(self._blocks, 0)
        return None

    def open_slab(self, num_slots: int, block_bytes: int) -> HostSlab:
        """The slab in this memory."""
        num_bytes = max(num_slots * slot_bytes(block_bytes), mmap.PAGESIZE)
        try:
            os.ftruncate(self._blocks, num_bytes)
            pages = mmap.mmap(self._blocks, num_bytes)
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"a host tier of {num_bytes / (1 << 30):.1f} GiB cannot be allocated: {exc}; "
                "lower --swap-space"
            ) from exc
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        return HostSlab(num_slots, block_bytes, memory=memoryview(pages), file=self._blocks)

    def adopt(self, cache: TieredCache, block_bytes: int, clock: Clock) -> SlotDirectory:
        """Make the complete blocks of this model findable, and return the directory."""
        scheme = cache.scheme
        shape = DirectoryShape(
            identity=scheme.root(Namespace()),
            num_slots=cache.config.host_blocks,
            block_bytes=block_bytes,
        )
        directory = SlotDirectory(self._directory, shape, cache.block_tokens)
        records = list(directory.records())
        runs = build_runs(records, scheme)
        cache.adopt_host(runs, now=clock.now())
        num_adopted = sum(len(run.slots) for run in runs)
        if records:
            log.info(
                "host tier adopted: blocks=%d of=%d runs=%d",
                *(num_adopted, len(records), len(runs)),
            )
        return directory


class HostRecorder:
    """Keeps the directory correct while the engine runs. Used by the loop's thread."""

    def __init__(self, cache: TieredCache, directory: SlotDirectory, clock: Clock) -> None:
        self._cache = cache
        self._directory = directory
        self._clock = clock

    def record(self) -> None:
        """Record the blocks that arrived on the host since the last call."""
        changes = self._cache.take_host_changes()
        if changes:
            self._directory.apply(changes, self._cache.scheme, now=self._clock.now())

    def before_copies(self, plans: Sequence[Plan]) -> None:
        """Empty the records of the host slots that copies are about to write. Earlier arrivals
        are recorded first, because a slot may be evicted and written again in the same turn."""
        self.record()
        for plan in plans:
            if isinstance(plan, TransferJob) and plan.target is Tier.HOST:
                self._directory.invalidate(plan.target_slots)


def build_runs(records: list[SlotRecord], scheme: KeyScheme) -> list[AdoptedRun]:
    """The blocks that can be found from the beginning of a path, joined into runs.

    A block is left out if its key is not the hash of its parent and tokens, or if a block
    before it is missing because that block was only on the device.
    """
    children: dict[BlockKey, dict[BlockKey, SlotRecord]] = {}
    for record in records:
        if scheme.chain(record.parent, record.tokens, None) == [record.key]:
            children.setdefault(record.parent, {})[record.key] = record
    runs: list[AdoptedRun] = []
    for salt in sorted({record.salt for record in records}):
        namespace = Namespace(salt)
        pending: list[tuple[SlotRecord, int | None]] = [
            (record, None) for record in children.get(scheme.root(namespace), {}).values()
        ]
        while pending:
            record, before = pending.pop()
            run = [record]
            while len(after := list(children.get(run[-1].key, {}).values())) == 1:
                run += after
            runs.append(_joined(namespace, before, run))
            pending += [(child, len(runs) - 1) for child in after]
    return _with_ages(runs)


def _joined(namespace: Namespace, before: int | None, run: list[SlotRecord]) -> AdoptedRun:
    return AdoptedRun(
        namespace=namespace,
        before=before,
        tokens=b"".join(record.tokens for record in run),
        keys=[record.key for record in run],
        slots=np.array([record.slot for record in run], dtype=np.int64),
        used_s=max(record.written_s for record in run),
    )


def _with_ages(runs: list[AdoptedRun]) -> list[AdoptedRun]:
    """The runs, each as young as the youngest run after it, because both were used together."""
    ages = [run.used_s for run in runs]
    for number in range(len(runs) - 1, -1, -1):
        before = runs[number].before
        if before is not None:
            ages[before] = max(ages[before], ages[number])
    return [replace(run, used_s=age) for run, age in zip(runs, ages, strict=True)]
