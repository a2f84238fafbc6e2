"""Two processes that write the same blocks to one directory: no slot is lost (lesson 85)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.cli import main
from headwater.storage import BlockRead, BlockWrite
from headwater.storage.file.backend import FileStorage
from headwater.testing.faults import Fault, damage
from headwater.testing.media import FileMedium
from headwater.testing.storage import make_keys, read_run, write_run
from tests.storage.conftest import FILE_BLOCK_BYTES, MakeFile

KEYS = make_keys(12)


def num_lost(storage: FileStorage) -> int:
    """Slots that are neither findable nor free."""
    index = storage._index
    total = sum(slab.geometry.num_slots for slab in index.slabs)
    return total - index.num_blocks - len(index._free)


def write_twice(make_file: MakeFile) -> tuple[FileStorage, FileStorage]:
    """Two owners that wrote the same blocks: neither checked after the other had begun."""
    first, second = make_file(), make_file()
    second._look = lambda keys, deadline: None  # type: ignore[method-assign]
    assert write_run(first, KEYS, FILE_BLOCK_BYTES) == [BlockWrite.WRITTEN] * 12
    assert write_run(second, KEYS, FILE_BLOCK_BYTES) == [BlockWrite.WRITTEN] * 12
    return first, second


def test_taking_over_a_slab_frees_its_copies(make_file: MakeFile) -> None:
    """The blocks are found once, and the slots of the copies can be used again."""
    first, second = write_twice(make_file)
    first.close()
    del first

    second._adopt()

    second.check()
    assert num_lost(second) == 0
    assert second.stats().num_blocks == 12
    assert read_run(second, KEYS, FILE_BLOCK_BYTES) == [BlockRead.READ] * 12


def test_a_restart_frees_copies(make_file: MakeFile) -> None:
    """Copies of an older version are freed too: the next process has every slot."""
    for storage in write_twice(make_file):
        storage.close()
    del storage

    third = make_file()

    third.check()
    assert num_lost(third) == 0
    assert read_run(third, KEYS, FILE_BLOCK_BYTES) == [BlockRead.READ] * 12
    third.close()
    del third
    assert num_lost(make_file()) == 0


def test_a_slab_taken_over_during_a_write_loses_no_slot(make_file: MakeFile) -> None:
    """The slab contains the block that is being written: the slot of one copy is freed."""
    first, second = make_file(), make_file()
    [key] = make_keys(1, run="new")
    write_run(first, [key], FILE_BLOCK_BYTES)
    second._look = lambda keys, deadline: None  # type: ignore[method-assign]
    write_run(second, KEYS[:1], FILE_BLOCK_BYTES)
    index = second._index
    assert index.claim(key)
    place, _ = index.take(key, KEYS[0], evict=False)
    assert place is not None
    first.close()
    del first
    second._adopt()

    assert not index.commit(place)
    second._drop_copy(place)
    index.unclaim(key)

    second.check()
    assert num_lost(second) == 0
    assert read_run(second, [key], FILE_BLOCK_BYTES) == [BlockRead.READ]


def test_two_processes_race_for_the_same_keys(tmp_path: Path) -> None:
    """Real processes begin at the same moment; afterwards every slot is found or free."""
    command = [sys.executable, "-m", "tests.storage.racer", str(tmp_path)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    written = [json.loads(racer.communicate(timeout=60)[0]) for racer in racers]
    assert sum(written) >= 200

    from tests.storage.racer import BLOCK_BYTES, KEYS, open_racer

    storage = open_racer(tmp_path)
    storage.check()
    assert num_lost(storage) == 0
    assert read_run(storage, KEYS, BLOCK_BYTES) == [BlockRead.READ] * len(KEYS)
    storage.close()


def test_verify_finds_copies_and_repair_frees_them(
    make_file: MakeFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Damaged blocks are treated alike; a slab with an owner is reported and not changed."""
    first, second = write_twice(make_file)
    folder = tmp_path / "blocks"
    damage(FileMedium(folder), KEYS[:1], Fault.FLIPPED_BIT)

    def verify(*more: str) -> dict[str, int]:
        code = main(["storage", "verify", str(folder), "--json", *more])
        findings = json.loads(capsys.readouterr().out)["findings"]
        assert code == (1 if any(not bad["is_repaired"] for bad in findings) else 0)
        reasons = [bad["reason"] for bad in findings]
        return {
            "duplicate": reasons.count("duplicate"),
            "bad_checksum": reasons.count("bad_checksum"),
            "freed": sum(bad["is_repaired"] for bad in findings),
        }

    assert verify("--repair") == {"duplicate": 11, "bad_checksum": 1, "freed": 0}
    first.close()
    second.close()
    del first, second
    assert verify() == {"duplicate": 11, "bad_checksum": 1, "freed": 0}
    assert verify("--repair") == {"duplicate": 11, "bad_checksum": 1, "freed": 12}
    assert verify() == {"duplicate": 0, "bad_checksum": 0, "freed": 0}
    assert read_run(make_file(), KEYS, FILE_BLOCK_BYTES) == [BlockRead.READ] * 12
