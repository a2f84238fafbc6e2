"""Signals of a serving process: SIGTERM and SIGINT stop it."""

import asyncio
import signal
from collections.abc import Callable
from datetime import datetime
from types import FrameType


def unix_s() -> float:
    """Unix time."""
    return datetime.now().timestamp()


class StopSignals:
    """Records SIGTERM and SIGINT until a handler is attached. So a signal during start is
    neither fatal nor lost."""

    def __init__(self) -> None:
        self._was_signalled = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def attach(self, stop: Callable[[], None]) -> None:
        """Call `stop` in the running event loop for each signal, those that came before
        included."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        if self._was_signalled:
            stop()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._was_signalled = True


def on_hangup(reload: Callable[[], None]) -> None:
    """Call `reload` in the running event loop on SIGHUP."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
