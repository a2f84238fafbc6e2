"""Whether work in a thread keeps the interpreter from all others."""

import select
import sys
from collections.abc import Callable
from itertools import pairwise
from threading import Event, Thread
from time import perf_counter

_ATTEMPTS = 5


def holds_interpreter(work: Callable[[], object]) -> bool:
    """Whether other threads stand still for most of the time that `work` takes.

    Threads are not switched by the clock meanwhile, so this one has its turns only where
    `work` lets go. The most favourable of some attempts counts, because a busy machine
    makes threads stand still too. `work` should take some milliseconds.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        return min(_longest_gap(work) for _ in range(_ATTEMPTS)) > 0.5
    finally:
        sys.setswitchinterval(before)


def _longest_gap(work: Callable[[], object]) -> float:
    """The longest time between two turns of ours, as a share of the time of `work`."""
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
        select.select((), (), (), 0)  # lets go, and takes its turn when it may
        turns.append(perf_counter())
    thread.join()
    inside = [turn for turn in turns if began[0] < turn < ended[0]]
    marks = [began[0], *inside, ended[0]]
    longest = max(later - earlier for earlier, later in pairwise(marks))
    return longest / (ended[0] - began[0])
