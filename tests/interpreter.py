"""Whether work in a thread blocks all other threads of the interpreter."""

import select
import sys
from collections.abc import Callable
from itertools import pairwise
from threading import Event, Thread
from time import perf_counter

_ATTEMPTS = 20


def holds_interpreter(work: Callable[[], object]) -> bool:
    """Whether other threads stand still for most of the time that `work` takes.

    Threads are not switched by time meanwhile, so this thread runs only when `work` releases
    the lock. One attempt that shows this is enough, because a busy machine also stops threads.
    `work` should take some milliseconds.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        return all(_longest_gap(work) > 0.5 for _ in range(_ATTEMPTS))
    finally:
        sys.setswitchinterval(before)


def _longest_gap(work: Callable[[], object]) -> float:
    """The longest time in which this thread did not run, as a share of the time of `work`."""
    ready, go_on = Event(), Event()
    began, ended = [0.0], [0.0]

    def run() -> None:
        ready.set()
        go_on.wait()
        began[0] = perf_counter()
        work()
        ended[0] = perf_counter()

    thread = Thread(target=run)
    thread.start()
    ready.wait()
    turns = [perf_counter()]
    go_on.set()
    while not ended[0]:
        select.select((), (), (), 0)  # releases the lock and takes it again when possible
        turns.append(perf_counter())
    thread.join()
    inside = [turn for turn in turns if began[0] < turn < ended[0]]
    marks = [began[0], *inside, ended[0]]
    longest = max(later - earlier for earlier, later in pairwise(marks))
    return longest / (ended[0] - began[0])
