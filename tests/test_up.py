"""`headwater up`: what it refuses before it starts anything, and which GPU each instance sees."""

from pathlib import Path
from queue import SimpleQueue

import pytest

from headwater.cli import main
from headwater.cli.up import Child


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "say how many instances"),
        (["--prefill", "1"], "need --decode instances"),
        (["--mixed", "2", "--gpus", "0"], "2 instances need as many numbers"),
        (["--mixed", "1", "--gpus", "first"], "1 instances need as many numbers"),
        (["--mixed", "1", "--gpus", "0", "--", "--device", "cpu"], "leave one out"),
        (["--mixed", "1", "--gpus", "0", "--", "--device=cpu"], "leave one out"),
    ],
)
def test_nothing_is_started_where_it_makes_no_sense(flags, words, capsys):
    """A sentence, and an exit code that is not 0."""
    assert main(["up", *flags]) == 1

    assert words in capsys.readouterr().err


def test_an_instance_sees_its_own_gpu_and_no_other():
    """By the driver's own switch, so every library agrees."""
    child = Child("router", ["route", "--port", "0"], SimpleQueue(), gpu="5")
    seen = Path(f"/proc/{child.process.pid}/environ").read_bytes().split(b"\0")
    child.stop()
    child.wait()

    assert b"CUDA_VISIBLE_DEVICES=5" in seen
