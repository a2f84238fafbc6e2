"""`headwater storage` on directories that servers use or used."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.cli import main
from headwater.clock import SystemClock
from headwater.storage.file.backend import FileConfig, FileStorage
from headwater.testing.faults import Fault, damage
from headwater.testing.media import FileMedium
from headwater.testing.storage import make_format, make_keys, write_run

BLOCK_BYTES = 4096


def fill(path: Path, model: str, num_blocks: int) -> FileStorage:
    form = make_format(model, block_bytes=BLOCK_BYTES)
    config = FileConfig(path=str(path), slab_bytes=4 * 8272 + 4096, reserve_bytes=0)
    storage = FileStorage(config, form, SystemClock())
    write_run(storage, make_keys(num_blocks, run=model), BLOCK_BYTES)
    return storage


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A living slab of one model, and two dead ones of another."""
    fill(tmp_path, "old", 6).close()
    storage = fill(tmp_path, "new", 3)
    yield tmp_path
    storage.close()


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    assert main(["storage", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_ls_lists_slabs_and_blocks(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slabs have their model, how full they are, and whether they have an owner."""
    slabs = run_json(capsys, "ls", str(directory))["slabs"]
    assert sorted((slab["num_blocks"], slab["in_use"]) for slab in slabs) == [
        (2, False),
        (3, True),
        (4, False),
    ]

    blocks = run_json(capsys, "ls", str(directory), "--blocks")["blocks"]
    assert {block["key"] for block in blocks} == {
        key.hex() for key in make_keys(6, run="old") + make_keys(3, run="new")
    }
    assert main(["storage", "ls", str(directory)]) == 0
    assert "in use" in capsys.readouterr().out


def test_stats_sums_by_model(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output also has the total, as on the disk."""
    stats = run_json(capsys, "stats", str(directory))

    assert sorted(model["blocks"] for model in stats["models"].values()) == [3, 6]
    assert stats["used_bytes"] == sum(
        path.stat().st_size for path in directory.iterdir() if path.name != "lock"
    )
    assert main(["storage", "stats", str(directory)]) == 0
    output = capsys.readouterr().out
    assert "in 2 slabs, 0 in use" in output
    assert "in 1 slab, 1 in use" in output
    assert "in all" in output


def test_verify_reads_everything_and_names_what_is_damaged(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 0 if everything is intact, otherwise 1."""
    assert run_json(capsys, "verify", str(directory))["blocks_good"] == 9
    key = make_keys(6, run="old")[2]
    damage(FileMedium(directory), [key], Fault.FLIPPED_BIT)

    result = run_json(capsys, "verify", str(directory), code=1)

    assert result["blocks_good"] == 8
    [finding] = result["findings"]
    assert (finding["key"], finding["reason"]) == (key.hex(), "bad_checksum")
    assert main(["storage", "verify", str(directory)]) == 1
    assert (
        "8 blocks are whole, 1 are damaged, 0 slots hold second copies"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("suffix", [".table", ".slab"])
def test_a_slab_that_cannot_be_read_is_named_and_pruned(
    directory: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    """All blocks of the slab are lost: it is listed, counted as damage, and deleted on
    request."""
    dead = [
        slab for slab in run_json(capsys, "ls", str(directory))["slabs"] if not slab["in_use"]
    ]
    broken = dead[0]["name"]
    os.truncate(directory / f"{broken}{suffix}", 10)

    slabs = run_json(capsys, "ls", str(directory))["slabs"]
    assert [slab["name"] for slab in slabs if not slab["readable"]] == [broken]
    [finding] = run_json(capsys, "verify", str(directory), code=1)["findings"]
    assert (finding["slab"], finding["reason"]) == (broken, "unreadable")
    for action, code in (("ls", 0), ("stats", 0), ("verify", 1)):
        assert main(["storage", action, str(directory)]) == code
        assert "cannot be read" in capsys.readouterr().out

    assert broken in run_json(capsys, "prune", str(directory), "--all")["deleted"]
    assert not list(directory.glob(f"{broken}*"))
    assert run_json(capsys, "verify", str(directory))["findings"] == []


def test_prune_deletes_only_slabs_without_an_owner(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oldest are deleted first, down to a size; a dry run only lists them."""
    would = run_json(capsys, "prune", str(directory), "--all", "--dry-run")
    assert len(would["would_delete"]) == 2
    assert len(list(directory.glob("*.slab"))) == 3

    run_json(capsys, "prune", str(directory), "--to", "80KiB")
    assert len(list(directory.glob("*.slab"))) == 2
    run_json(capsys, "prune", str(directory), "--model", "ffff")
    assert len(list(directory.glob("*.slab"))) == 2
    run_json(capsys, "prune", str(directory), "--all")
    assert len(list(directory.glob("*.slab"))) == 1
    [slab] = run_json(capsys, "ls", str(directory))["slabs"]
    assert slab["in_use"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ls", "/no/such"], "/no/such does not exist"),
        (["stats", "{empty}"], "is not a storage directory"),
        (["prune", "{directory}"], "say what to prune"),
        (["prune", "{directory}", "--to", "lots"], "is not a number of bytes"),
    ],
)
def test_mistakes_in_settings_get_a_message(
    directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    """The exit code is 1, and nothing is created or deleted."""
    names = {"directory": directory, "empty": tmp_path_factory.mktemp("empty")}

    assert main(["storage", *(word.format(**names) for word in arguments)]) == 1
    assert sentence in capsys.readouterr().err


def test_an_unknown_flag_gets_a_suggestion(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`headwater storage` suggests the flag, as every other command does."""
    assert main(["storage", "prune", str(directory), "--dryrun"]) == 2
    assert "--dry-run" in capsys.readouterr().err
