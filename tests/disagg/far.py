"""The far end of a link in a process of its own, for tests that kill or stop it.

far.py receive LINK               opens lease 1 and prints its address
far.py send ADDRESS LEASES        pushes all blocks to lease 1, 2 … and prints each outcome
"""

import sys
from threading import Event

from headwater.clock import SystemClock
from headwater.disagg.links.config import LinkConfig
from headwater.disagg.links.registry import Links
from headwater.disagg.protocol.push import Push
from headwater.testing.links import BlockArray, EventLog
from tests.disagg.wire import pieces_of

CONFIG = LinkConfig(token=b"a token of tests", connect_timeout_s=1.0)
NUM_SLOTS = 8
BLOCK_BYTES = 1 << 20
SEED = 3


def say(what: object) -> None:
    """Print one line for the test."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


def receive(link: str) -> None:
    """Accept everything for lease 1, until killed."""
    receiver = Links(CONFIG, BlockArray(NUM_SLOTS, BLOCK_BYTES), EventLog()).listen(link)
    receiver.open(1, range(NUM_SLOTS))
    say(receiver.address)
    Event().wait(60.0)


def send(address: str, num_leases: int) -> None:
    """Push again and again, until done or killed."""
    log = EventLog()
    memory = BlockArray(NUM_SLOTS, BLOCK_BYTES, seed=SEED)
    sender = Links(CONFIG, memory, log).connect(address)
    pieces = pieces_of(range(NUM_SLOTS), BLOCK_BYTES)
    for lease in range(1, num_leases + 1):
        deadline_s = SystemClock().now() + 60.0
        sender.push(Push(job=lease, lease=lease, pieces=pieces, deadline_s=deadline_s))
        say(log.outcome(lease))


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]))
