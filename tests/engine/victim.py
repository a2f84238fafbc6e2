"""An engine that serves and writes to storage until it is killed.

    python -m tests.engine.victim BACKEND SETTINGS

It prints "writing" when its first request has ended, while its writes continue.
"""

import json
import sys

from headwater.storage import Opening, open_storage
from headwater.testing.tiers import EchoTiers, echo_format, make_echo_request

BLOCK_TOKENS = 64
PROMPT_TOKENS = 16 * BLOCK_TOKENS + 1


def make_victim_request(number: int):
    """The prompt with this number; the test sends the same prompt later."""
    tokens = [(number * 7 + at * (number + 3)) % 50 for at in range(PROMPT_TOKENS)]
    return make_echo_request(f"victim {number}", tokens, max_tokens=2, cache_salt="victim")


def main(name: str, settings: str) -> None:
    form = echo_format(BLOCK_TOKENS)
    storage = open_storage(name, json.loads(settings), Opening(format=form))
    engine = EchoTiers(
        num_blocks=64, host_blocks=256, block_tokens=BLOCK_TOKENS, storage=storage
    )
    number = 0
    while True:
        engine.run(make_victim_request(number), within_s=30)
        number += 1
        sys.stdout.write("writing\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
