"""I/O threads: calls that may hang, and callers that stop waiting."""

import os
import sys
from threading import Event, get_native_id
from threading import enumerate as enumerate_threads

import pytest

from headwater.errors import StorageError, StorageTimeout
from headwater.storage.io_threads import MAX_LOST, IoThreads


def test_results_come_in_order() -> None:
    """The order in which the threads finish does not matter."""
    threads = IoThreads("test", 3)

    assert threads.run([lambda n=n: n * n for n in range(20)], timeout_s=5) == [  # type: ignore[misc]
        n * n for n in range(20)
    ]
    assert threads.run([], timeout_s=5) == []
    threads.close()


def test_an_error_is_raised_after_all_calls_have_ended() -> None:
    """No buffer is in use when the caller gets the error."""
    threads, ended = IoThreads("test", 2), []

    def fail() -> None:
        raise ValueError("broken")

    def work() -> None:
        ended.append(1)

    with pytest.raises(ValueError, match="broken"):
        threads.run([fail, work, work, work], timeout_s=5)
    assert len(ended) == 3
    threads.close()


def test_a_hung_call_ends_the_wait_not_the_call() -> None:
    """`quiet` is set when the hung call has ended; calls that had not begun never begin (lesson
    50)."""
    threads, gate, begun = IoThreads("test", 1), Event(), Event()

    def begin() -> bool:
        begun.set()
        return True

    with pytest.raises(StorageTimeout) as caught:
        threads.run([gate.wait, begin], timeout_s=0.01)

    quiet = caught.value.quiet
    assert quiet is not None
    assert not quiet.is_set()
    gate.set()
    assert quiet.wait(5)
    assert threads.run([lambda: 3], timeout_s=5) == [3]
    assert not begun.is_set()
    threads.close()


def test_lost_threads_are_replaced_up_to_a_bound() -> None:
    """Calls continue beside hung ones. Above the bound a call never begins and is quiet at
    once, because its buffers were not touched. When the hung calls end, everything is as
    before."""
    threads, gate = IoThreads("test", 1), Event()
    for lost in range(MAX_LOST + 1):
        assert threads.num_lost == lost
        with pytest.raises(StorageTimeout):
            threads.run([gate.wait], timeout_s=0.01)
        if lost < MAX_LOST:
            assert threads.run([lambda: 1], timeout_s=5) == [1]

    with pytest.raises(StorageTimeout) as caught:
        threads.run([lambda: 1], timeout_s=0.01)
    assert caught.value.quiet is not None
    assert caught.value.quiet.is_set()
    assert threads.num_lost == MAX_LOST + 1

    gate.set()
    assert threads.drain(5)
    assert threads.run([lambda: 2], timeout_s=5) == [2]
    assert threads.num_lost == 0
    threads.close()


def test_threads_that_come_back_do_not_add_up() -> None:
    """After hung calls have ended there are as many threads as before."""
    threads = IoThreads("test threads that come back", 2)
    for _ in range(5):
        gate = Event()
        with pytest.raises(StorageTimeout):
            threads.run([gate.wait, gate.wait], timeout_s=0.01)
        threads.run([lambda: 1, lambda: 1], timeout_s=5)
        gate.set()
        threads.drain(5)
    threads.run([lambda: 1], timeout_s=5)
    threads.drain(5)

    named = [t for t in enumerate_threads() if t.name == "test threads that come back"]
    assert len(named) <= 3  # one may still be ending
    threads.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has an idle policy")
def test_a_lost_thread_runs_on_idle_cores_only_and_takes_no_further_call() -> None:
    """A library that waits in a busy loop would otherwise take a core from the engine."""
    threads, gate, hung = IoThreads("test", 1), Event(), []

    def hang() -> None:
        hung.append(get_native_id())
        gate.wait()

    def policy() -> tuple[int, int]:
        return get_native_id(), os.sched_getscheduler(get_native_id())

    usual = os.sched_getscheduler(0)
    assert threads.run([policy], timeout_s=5)[0][1] == usual
    with pytest.raises(StorageTimeout) as caught:
        threads.run([hang], timeout_s=0.05)

    assert os.sched_getscheduler(hung[0]) == os.SCHED_IDLE
    gate.set()
    assert caught.value.quiet is not None
    assert caught.value.quiet.wait(5)
    for _ in range(8):
        [(thread, level)] = threads.run([policy], timeout_s=5)
        assert thread != hung[0]
        assert level == usual
    threads.close()


def test_closed_threads_take_no_calls() -> None:
    """Closing twice is safe."""
    threads = IoThreads("test", 1)
    threads.close()
    threads.close()

    with pytest.raises(StorageError, match="closed"):
        threads.run([lambda: 1], timeout_s=1)
