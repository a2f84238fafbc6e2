"""A process that writes runs of blocks to a storage directory until it is killed.

    python writer.py PATH RUN [BLOCKS]

Says "ready" before its first write; with BLOCKS it writes that many, says "done" and waits for
its input to close.
"""

import sys

from headwater.clock import SystemClock
from headwater.storage.file import FileConfig, FileStorage
from headwater.testing.storage import make_format, make_keys, write_run

BLOCK_BYTES = 64 << 10


def main(path: str, run: str, num_blocks: int | None) -> None:
    form = make_format(block_bytes=BLOCK_BYTES)
    # Room for few blocks, so that slots are reused all the time.
    config = FileConfig(path=path, capacity_bytes=3 << 20, slab_bytes=1 << 20, reserve_bytes=0)
    storage = FileStorage(config, form, SystemClock())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if num_blocks is not None:
        write_run(storage, make_keys(num_blocks, run=run), BLOCK_BYTES)
        sys.stdout.write("done\n")
        sys.stdout.flush()
        sys.stdin.read()
        return
    number = 0
    while True:
        write_run(storage, make_keys(6, run=f"{run} {number}"), BLOCK_BYTES)
        number += 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
