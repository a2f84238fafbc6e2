"""Processes end with their parent, and storage that anyone can write is refused."""

import os
import signal
import subprocess
import sys

import pytest

from headwater.errors import ConfigError
from headwater.storage.file.directory import SlabDirectory
from tests.waiting import is_running, until

PARENT = """
import os, subprocess, sys
read, write = os.pipe()
child = subprocess.Popen(
    [sys.executable, "-m", "headwater", "route", "--port", "0", "--insecure"],
    pass_fds=(read,),
    env=os.environ | {"HEADWATER_PARENT_PIPE": str(read)},
    start_new_session=True,
)
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_ends_when_its_parent_is_killed():
    """SIGKILL leaves the parent no time to stop its children: they notice it themselves."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    while "is ready" not in parent.stdout.readline():
        assert is_running(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    until(lambda: not is_running(child), within_s=60)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_storage_directory_that_all_can_write_is_refused(tmp_path, mode):
    """The message has the command that fixes it."""
    path = tmp_path / "blocks"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"chmod o-w {path}"):
        SlabDirectory(path)

    os.chmod(path, 0o770)
    SlabDirectory(path)
