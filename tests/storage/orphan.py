"""A process whose Mooncake master dies: it prints the results of its calls and exits at once.

    python orphan.py MASTER

It is a separate process, because the library tries for a long time to reach the master when it
is unloaded.
"""

import os
import sys

from headwater.errors import StorageError
from headwater.storage import Opening, open_storage
from headwater.testing.storage import make_format, make_keys, write_run

BLOCK_BYTES = 8192


def main(master: str) -> None:
    storage = open_storage(
        "mooncake",
        {"master": master, "segment_bytes": 1 << 24, "join_timeout_s": 1.0},
        Opening(format=make_format(block_bytes=BLOCK_BYTES)),
    )
    keys, view = make_keys(2), memoryview(bytearray(BLOCK_BYTES))
    write_run(storage, keys, BLOCK_BYTES)
    sys.stdout.write("stored\n")
    sys.stdout.flush()
    sys.stdin.readline()
    for call in (
        lambda: storage.contains([keys], timeout_s=0.5)[0],
        lambda: storage.read(keys, [view, view], timeout_s=0.5),
        lambda: storage.remove(keys, timeout_s=0.5),
        storage.close,
    ):
        try:
            call()
        except StorageError as error:
            sys.stdout.write(f"{type(error).__name__}\n")
        else:
            sys.stdout.write("fine\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
