"""Ends this process when the process that started it dies, for whatever reason.

`headwater up` gives each child the read end of a pipe and keeps the write end. When
this command dies, even from SIGKILL, the system closes the write end, and the children see the end
of the pipe.
"""

import os
import signal
import threading
from collections.abc import Mapping

VARIABLE = "HEADWATER_PARENT_PIPE"
"""Environment variable with the number of the descriptor to watch."""

_ABORT_AFTER_S = 5.0
_EXIT_AFTER_S = 10.0


def watch_parent(environment: Mapping[str, str]) -> None:
    """Watch the pipe of the environment, if there is one. Call once at start."""
    number = environment.get(VARIABLE, "")
    if number.isdigit():
        thread = threading.Thread(
            target=_watch, args=(int(number),), name="parent", daemon=True
        )
        thread.start()


def _watch(descriptor: int) -> None:
    os.set_inheritable(descriptor, False)
    while os.read(descriptor, 1):
        pass
    # The same signals as from an operator: the first drains, the second aborts, the third
    # kills.
    os.kill(os.getpid(), signal.SIGTERM)
    ended = threading.Event()
    ended.wait(_ABORT_AFTER_S)
    os.kill(os.getpid(), signal.SIGTERM)
    ended.wait(_EXIT_AFTER_S)
    os._exit(1)
