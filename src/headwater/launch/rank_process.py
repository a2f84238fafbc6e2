"""A rank other than the first: `python -m headwater.launch.rank_process FD PARENT FORMAT RANK`.

Rank 0, which is the engine, starts it. It ends when the engine ends, even by a kill.
"""

import ctypes
import os
import select
import signal
import socket
import sys
import threading
from typing import cast

from headwater.clock import SystemClock
from headwater.metrics.logs import LogFormat, set_up_logs

SEND_TIMEOUT_S = 60.0
"""A process of the engine that takes no message for this long is assumed to hang."""

SPIN_S = 0.0005
"""How long a rank polls for the next step before it sleeps: as long as planning a step
takes."""

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, parent: int, log_format: LogFormat, rank: int) -> int:
    """Serve rank 0 at the other end of `descriptor`; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the engine decides when to stop
    set_up_logs(log_format, speaker=f"rank {rank}")
    _end_with(parent)
    sock = socket.socket(fileno=descriptor)
    threading.Thread(target=_watch, args=(os.dup(descriptor),), daemon=True).start()
    # Imported after the signals are set, because torch takes seconds to import.
    from headwater.device.parallel.channel import RankChannel
    from headwater.device.parallel.worker import RankWorker

    channel = RankChannel(sock, send_timeout_s=SEND_TIMEOUT_S, spin_s=SPIN_S)
    code = RankWorker(channel, SystemClock()).run()
    sys.stderr.flush()
    os._exit(code)  # no thread or collective may delay the end


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends, even while this
    process is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def _watch(descriptor: int) -> None:
    """Exit when rank 0 is gone, even while this rank waits in a collective."""
    poller = select.poll()
    poller.register(descriptor, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


if __name__ == "__main__":
    fd, pid, form, number = sys.argv[1:]
    sys.exit(main(int(fd), int(pid), cast(LogFormat, form), int(number)))
