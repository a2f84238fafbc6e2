"""Ends an engine process whose device does not finish a step, because a kernel hangs or a rank
is lost.

The loop's thread is then inside the runner and cannot react. So another thread checks it, tells
the clients why the engine is dead, and ends the process at once: memory that the device may
still write to is not used again. This thread needs the interpreter lock, which runners release
while they wait.
"""

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from headwater.clock import Clock

log = logging.getLogger(__name__)

_LOOKS = 20
_MAX_LOOK_S = 1.0
"""Checks per timeout, so that a hanging step is detected at most a twentieth of the timeout
late; and the longest time between two checks, so that a lost rank is noticed soon.
"""

_NOTICE_S = 5.0
"""When a rank is lost, a step gets this long, from its beginning, to fail by itself.
Collectives between CPUs fail at once; those between GPUs wait for ever.
"""


class SteppingCore(Protocol):
    """The core that is watched. Read from another thread."""

    @property
    def device_since(self) -> tuple[float, int] | None:
        """The time at which the loop began to wait for the device, and the number of steps
        scheduled before; None while it does not wait."""

    @property
    def failure(self) -> str | None:
        """Why the core cannot continue; None while it can."""


class StepWatchdog:
    """Calls `die` once, from its own thread, when one wait for the device exceeds `timeout_s`,
    or continues although a part of the core is lost."""

    def __init__(
        self,
        core: SteppingCore,
        timeout_s: float,
        die: Callable[[str], None],
        clock: Clock,
    ) -> None:
        self._core = core
        self._timeout_s = timeout_s
        self._die = die
        self._clock = clock
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch until `stop`."""
        threading.Thread(target=self._watch, name="step-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching. Calling it twice is safe."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(self._timeout_s / _LOOKS, _MAX_LOOK_S)):
            since = self._core.device_since
            failure = self._core.failure
            if failure is not None and since is not None and self._is_stuck(since[0]):
                log.critical("a step waits for a lost rank: step=%d", since[1])
                self._die(failure)
                return
            if since is None or self._clock.now() - since[0] < self._timeout_s:
                continue
            sentence = (
                f"step {since[1]} did not end within {self._timeout_s:g} s: the "
                "device hangs or is lost, so the engine has ended"
            )
            log.critical("the device hangs: step=%d timeout_s=%g", since[1], self._timeout_s)
            self._die(sentence)
            return

    def _is_stuck(self, since_s: float) -> bool:
        """Whether a step that began at `since_s` has had time to notice a lost rank by itself."""
        return self._clock.now() - since_s > _NOTICE_S
