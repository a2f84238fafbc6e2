"""A process that joins a Mooncake pool, stores a run of blocks, and stays until its input closes.

python member.py MASTER RUN BLOCKS
"""

import sys

from headwater.storage import Opening, open_storage
from headwater.testing.storage import make_format, make_keys, write_run

BLOCK_BYTES = 8192


def main(master: str, run: str, num_blocks: int) -> None:
    storage = open_storage(
        "mooncake",
        {"master": master, "segment_bytes": 1 << 26},
        Opening(format=make_format(block_bytes=BLOCK_BYTES)),
    )
    outcomes = write_run(storage, make_keys(num_blocks, run=run), BLOCK_BYTES)
    sys.stdout.write(f"stored {[outcome.value for outcome in outcomes]}\n")
    sys.stdout.flush()
    sys.stdin.read()
    storage.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
