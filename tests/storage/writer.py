"""A process that writes runs of blocks to a storage directory until it is killed.

    python writer.py PATH forever            the same eight runs over and over, evicting as it goes
    python writer.py PATH some RUN BLOCKS    one run; says "done", and waits for its input to close
    python writer.py PATH die N              one run; kills itself half-way through its N-th write
                                             to a file, or says "done" where there is no such write

Says "ready" before its first block.
"""

import itertools
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from headwater.clock import SystemClock
from headwater.storage.file.backend import FileConfig, FileStorage
from headwater.testing.storage import (
    make_block,
    make_format,
    make_keys,
    make_parents,
    write_run,
)

BLOCK_BYTES = 256 << 10


def open_writer(path: str) -> FileStorage:
    """Storage with room for few blocks, so that slots are reused all the time, and with one
    thread, so that the n-th write is always the same."""
    form = make_format(block_bytes=BLOCK_BYTES)
    config = FileConfig(
        path=path, capacity_bytes=4 << 20, slab_bytes=2 << 20, reserve_bytes=0, num_threads=1
    )
    return FileStorage(config, form, SystemClock())


def write_forever(storage: FileStorage) -> None:
    runs = [make_keys(6, run=f"forever {number}") for number in range(8)]
    work = [(keys, [make_block(key, BLOCK_BYTES) for key in keys]) for keys in runs]
    say("ready")
    for keys, blocks in itertools.cycle(work):
        storage.write(keys, blocks, parents=make_parents(keys), timeout_s=30)


def write_some(storage: FileStorage, run: str, num_blocks: int) -> None:
    say("ready")
    write_run(storage, make_keys(num_blocks, run=run), BLOCK_BYTES)
    say("done")
    sys.stdin.read()


def write_and_die(storage: FileStorage, last: int) -> None:
    """Write until the `last`-th write, and kill this process when half of its bytes are
    written."""
    counter = itertools.count(1)
    real_pwrite, real_pwritev = os.pwrite, os.pwritev

    def pwrite(fd: int, raw: bytes, at: int) -> int:
        if next(counter) == last:
            real_pwrite(fd, raw[: len(raw) // 2], at)
            os.kill(os.getpid(), signal.SIGKILL)
        return real_pwrite(fd, raw, at)

    def pwritev(fd: int, parts: Sequence[Any], at: int) -> int:
        if next(counter) == last:
            page, payload = parts
            half = len(payload) // 2 // 4096 * 4096
            real_pwritev(fd, [page, payload[:half]], at)
            os.kill(os.getpid(), signal.SIGKILL)
        return real_pwritev(fd, parts, at)

    os.pwrite, os.pwritev = pwrite, pwritev  # type: ignore[assignment]
    say("ready")
    write_run(storage, make_keys(4, run=f"die {last}"), BLOCK_BYTES)
    say("done")


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(path: str, mode: str, *more: str) -> None:
    storage = open_writer(path)
    if mode == "forever":
        write_forever(storage)
    elif mode == "some":
        write_some(storage, more[0], int(more[1]))
    else:
        write_and_die(storage, int(more[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
