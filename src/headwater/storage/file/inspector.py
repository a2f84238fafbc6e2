"""Reads a storage directory without being a backend, for the command line.

It reads every slab of every model, with or without an owner. Only `prune` and a repairing
`verify` change something, and only in slabs without a living owner.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import ConfigError, StorageCorrupt
from headwater.storage.file.directory import SlabDirectory
from headwater.storage.file.slab import Slab
from headwater.storage.file.table import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabSummary:
    """One slab, as described by its table."""

    name: str
    model: str
    """Fingerprint of the deployment, in hexadecimal; empty if it cannot be read."""

    block_bytes: int
    num_blocks: int
    num_slots: int
    total_bytes: int
    in_use: bool
    """Whether a living process owns it."""

    written_at_s: float
    """When its table last changed, in seconds since 1970."""

    readable: bool = True
    """Whether table and slab are valid; if not, no block in it is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An unusable slot, or a slab that cannot be read."""

    slab: str
    slot: int | None
    """None, with an empty key, for a whole slab."""

    key: str
    reason: str
    """`unreadable` for a slab; `duplicate` for a block that another slot has too; otherwise why
    the block differs from its table entry."""

    is_repaired: bool = False
    """Whether the slot was freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of a full read of a directory."""

    blocks_good: int
    bytes_read: int
    findings: list[Finding]


class StorageInspector:
    """A directory, opened for reading. Raises ConfigError if it is not a storage directory."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            fault = "is not a directory" if path.exists() else "does not exist"
            raise ConfigError(f"{path} {fault}; give the path of a storage directory")
        if not (path / "lock").exists():
            raise ConfigError(
                f"{path} is not a storage directory: it has no file named "
                f"'lock'; give another path"
            )
        self._directory = SlabDirectory(path)

    @property
    def used_bytes(self) -> int:
        return self._directory.used_bytes()

    def slabs(self) -> list[SlabSummary]:
        """Every slab, oldest first, including those that no process can use any more."""
        found = [
            self._describe(name, self._directory.peek(name))
            for name in self._directory.names()
            if self._directory.bytes_of(name)
        ]
        return sorted(found, key=lambda slab: (slab.written_at_s, slab.name))

    def blocks(self) -> Iterator[tuple[str, Slab, Entry]]:
        """Every block in the tables, slab by slab, in the order of writing."""
        for name, slab in self._open_all():
            for entry in sorted(slab.table.entries(), key=lambda entry: entry.sequence):
                yield name, slab, entry

    def verify(self, *, repair: bool = False) -> Verification:
        """Read every block and check it. With `repair`, slots with damaged blocks and with second
        copies are freed, in slabs that no living process owns."""
        good, num_bytes = 0, 0
        findings = [
            Finding(slab=slab.name, slot=None, key="", reason="unreadable")
            for slab in self.slabs()
            if not slab.readable
        ]
        seen: set[tuple[bytes, bytes]] = set()
        for name, slab, entry in self.blocks():
            form = slab.geometry.form
            reason = _fault_of(slab, entry)
            if reason is None and (form.fingerprint, entry.key) in seen:
                reason = "duplicate"
            if reason is None:
                seen.add((form.fingerprint, entry.key))
                good += 1
                num_bytes += form.block_bytes
            # the owner has not reused the slot meanwhile
            elif slab.table.at(entry.slot) == entry:
                freed = repair and self._directory.free_slot(name, entry)
                found = Finding(
                    slab=name,
                    slot=entry.slot,
                    key=entry.key.hex(),
                    reason=reason,
                    is_repaired=freed,
                )
                findings.append(found)
        return Verification(blocks_good=good, bytes_read=num_bytes, findings=findings)

    def prune(
        self, *, to_bytes: int | None = None, model: str | None = None, dry_run: bool = False
    ) -> list[SlabSummary]:
        """Delete slabs without an owner, oldest first: those of `model`, or of every model,
        until the directory takes at most `to_bytes`. Returns what was, or would be, deleted."""
        gone: list[SlabSummary] = []
        used = self.used_bytes
        for slab in self.slabs():
            if slab.in_use or (model is not None and not slab.model.startswith(model)):
                continue
            if to_bytes is not None and used <= to_bytes:
                break
            if dry_run or self._directory.prune(slab.name):
                gone.append(slab)
                used -= slab.total_bytes
        return gone

    def _open_all(self) -> Iterator[tuple[str, Slab]]:
        for name in sorted(self._directory.names()):
            slab = self._directory.peek(name)
            if slab is not None:
                yield name, slab

    def _describe(self, name: str, slab: Slab | None) -> SlabSummary:
        return SlabSummary(
            name=name,
            model="" if slab is None else slab.geometry.form.fingerprint.hex(),
            block_bytes=0 if slab is None else slab.geometry.form.block_bytes,
            num_blocks=0 if slab is None else sum(1 for _ in slab.table.entries()),
            num_slots=0 if slab is None else slab.geometry.num_slots,
            total_bytes=self._directory.bytes_of(name),
            in_use=self._directory.is_owned(name),
            written_at_s=self._directory.written_at_s(name),
            readable=slab is not None,
        )


def _fault_of(slab: Slab, entry: Entry) -> str | None:
    """Why a block differs from its table entry; None if it does not."""
    try:
        slab.read(entry, memoryview(bytearray(slab.geometry.form.block_bytes)))
    except StorageCorrupt as error:
        return error.reason
    except OSError:
        return "io_error"
    return None
