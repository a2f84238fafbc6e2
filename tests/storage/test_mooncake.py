"""The mooncake backend against a real master: a pool of several processes."""

import builtins
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import ConfigError
from headwater.storage import BlockRead, BlockWrite, Opening, open_storage
from headwater.testing.ports import free_port
from headwater.testing.storage import (
    make_block,
    make_format,
    make_keys,
    make_parents,
    read_run,
    write_run,
)
from tests.storage.conftest import MooncakeMaster
from tests.storage.member import BLOCK_BYTES

FORM = make_format(block_bytes=BLOCK_BYTES)


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.slow
def test_two_processes_hit_each_others_blocks(mooncake_master: MooncakeMaster) -> None:
    """The test's process reads what the other one stored, and never writes it again."""
    keys = make_keys(6, run="member")
    member = start("tests.storage.member", mooncake_master.address, "member", "6")
    assert member.stdout is not None
    assert member.stdout.readline() == f"stored {['written'] * 6}\n"
    ours = open_storage(
        "mooncake",
        {"master": mooncake_master.address, "segment_bytes": 0},
        Opening(format=FORM),
    )

    assert ours.contains([keys], timeout_s=10)[0] == 6
    assert read_run(ours, keys, BLOCK_BYTES) == [BlockRead.READ] * 6
    assert write_run(ours, keys, BLOCK_BYTES) == [BlockWrite.PRESENT] * 6
    assert ours.stats().bytes_written == 0

    member.communicate()
    assert read_run(ours, keys, BLOCK_BYTES) == [BlockRead.ABSENT] * 6, "it took them with it"
    ours.close()


@pytest.mark.slow
def test_slots_of_the_slab_are_used_in_place(mooncake_master: MooncakeMaster) -> None:
    """Memory given at opening is registered once; a full pool refuses writes, which is counted
    (lesson 43)."""
    slab = memoryview(mmap.mmap(-1, 64 * BLOCK_BYTES))
    slots = [slab[at : at + BLOCK_BYTES] for at in range(0, len(slab), BLOCK_BYTES)]
    storage = open_storage(
        "mooncake",
        {"master": mooncake_master.address, "segment_bytes": 1 << 24},
        Opening(format=FORM, memory=slab),
    )
    keys = make_keys(150, run="slab")
    for key, slot in zip(keys, slots, strict=False):
        slot[:] = make_block(key, BLOCK_BYTES)

    wrote = storage.write(keys[:64], slots, parents=make_parents(keys[:64]), timeout_s=10)
    slab[:] = bytes(len(slab))
    got = storage.read(keys[:64], slots, timeout_s=10)

    assert wrote == [BlockWrite.WRITTEN] * 64
    assert got == [BlockRead.READ] * 64
    for key, slot in zip(keys, slots, strict=False):
        assert slot == make_block(key, BLOCK_BYTES)
    storage.close()


@pytest.mark.slow
def test_a_dead_master_is_an_error_within_the_timeout() -> None:
    """A call without a master neither hangs nor looks like a miss; closing is safe (lessons 18,
    38)."""
    master = MooncakeMaster()
    orphan = start("tests.storage.orphan", master.address)
    assert orphan.stdout is not None
    assert orphan.stdout.readline() == "stored\n"
    master.stop()

    told, _ = orphan.communicate("the master is dead\n", timeout=20)

    *calls, closed = told.splitlines()
    assert len(calls) == 3
    assert set(calls) <= {"StorageError", "StorageTimeout"}
    assert closed == "fine"
    assert orphan.returncode == 0


@pytest.mark.slow
def test_a_missing_master_gets_a_message_at_start() -> None:
    """The message has the master's address (lesson 61)."""
    pytest.importorskip("mooncake")
    with pytest.raises(ConfigError, match="check that mooncake_master runs there"):
        open_storage(
            "mooncake",
            {"master": f"127.0.0.1:{free_port()}", "join_timeout_s": 2.0, "segment_bytes": 0},
            Opening(format=FORM),
        )


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ModuleNotFoundError("mooncake"), r"pip install 'headwater\[mooncake\]'"),
        (ImportError("libibverbs.so.1: no such file"), "apt-get install libibverbs1"),
    ],
)
def test_a_missing_package_gets_a_message(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, sentence: str
) -> None:
    """The message says what to install."""
    real = builtins.__import__

    def refuse(name: str, *more: Any) -> Any:
        if name.startswith("mooncake"):
            raise error
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=sentence):
        open_storage("mooncake", {"master": "127.0.0.1:1"}, Opening(format=FORM))
