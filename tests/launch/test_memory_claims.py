"""Engines that start together do not choose the same memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headwater.launch.memory_claims import open_claims


def claimed_bytes(folder: Path) -> int:
    with open_claims(folder) as claims:
        assert claims is not None
        return claims.num_bytes


def test_claims_are_seen_until_they_are_withdrawn(tmp_path: Path):
    """Each engine subtracts what the others have chosen and not allocated."""
    with open_claims(tmp_path) as claims:
        assert claims is not None
        assert claims.num_bytes == 0
        claim = claims.add(60 << 30)
    assert claimed_bytes(tmp_path) == 60 << 30
    with open_claims(tmp_path) as claims:
        assert claims is not None
        other = claims.add(30 << 30)
    assert claimed_bytes(tmp_path) == 90 << 30
    claim.withdraw()
    claim.withdraw()
    assert claimed_bytes(tmp_path) == 30 << 30
    other.withdraw()

    assert claimed_bytes(tmp_path) == 0


def test_the_claim_of_a_killed_process_ends_with_it(tmp_path: Path):
    """The kernel releases the lock of the process, and the next engine removes the file (lesson
    60)."""
    code = (
        "import sys, pathlib; from headwater.launch.memory_claims import open_claims\n"
        "with open_claims(pathlib.Path(sys.argv[1])) as claims: claim = claims.add(5)\n"
        "print('claimed', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"claimed\n"
        while_alive = claimed_bytes(tmp_path)
        process.kill()
        process.wait()

    assert while_alive == 5
    assert claimed_bytes(tmp_path) == 0
    assert os.listdir(tmp_path) == ["lock"]


def test_a_folder_that_cannot_be_used_prevents_no_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The log says what may happen."""
    with open_claims(tmp_path / "missing") as claims:
        assert claims is None

    assert "may choose the same memory" in caplog.text


def test_a_start_that_holds_the_folder_is_not_waited_for_without_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """A stopped process keeps its lock. Later engines start nevertheless, and see the claims
    made so far."""
    with open_claims(tmp_path) as held:
        assert held is not None
        claim = held.add(60 << 30)
        with open_claims(tmp_path, timeout_s=0.01) as claims:
            assert claims is not None
            assert claims.num_bytes == 60 << 30
    claim.withdraw()

    assert "takes too long to choose its memory" in caplog.text
