"""A process that writes blocks to a shared directory as soon as it is told to.

python -m tests.storage.racer PATH

It prints "ready", waits for a line, writes the same blocks as every other racer, and prints how
many.
"""

import sys
from pathlib import Path

from headwater.clock import SystemClock
from headwater.storage import BlockWrite
from headwater.storage.file.backend import FileConfig, FileStorage
from headwater.testing.storage import make_format, make_keys, write_run

BLOCK_BYTES = 4096
KEYS = make_keys(200, run="race")


def open_racer(path: Path) -> FileStorage:
    config = FileConfig(path=str(path), slab_bytes=1 << 20, reserve_bytes=0)
    return FileStorage(config, make_format(block_bytes=BLOCK_BYTES), SystemClock())


def main(path: Path) -> None:
    storage = open_racer(path)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    num_written = 0
    for start in range(0, len(KEYS), 8):
        outcomes = write_run(storage, KEYS[start : start + 8], BLOCK_BYTES)
        num_written += outcomes.count(BlockWrite.WRITTEN)
    sys.stdout.write(f"{num_written}\n")
    storage.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
