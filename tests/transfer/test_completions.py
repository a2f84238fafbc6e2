"""The one completion queue: nothing is lost, nothing is polled, a sleeping loop is woken."""

import os
import select
import threading
from concurrent.futures import ThreadPoolExecutor

from headwater.cache import JobStatus
from headwater.transfer.completions import CompletionQueue, JobCompletion
from headwater.types import JobId


def make_completion(number: int) -> JobCompletion:
    return JobCompletion(JobId(number), JobStatus.DONE, 1)


def test_completions_come_out_in_order_and_once():
    """Lesson 18: a take that finds nothing returns nothing, at once."""
    queue = CompletionQueue()
    assert queue.take() == []

    queue.put(make_completion(1))
    queue.put(make_completion(2))

    assert queue.has_any
    assert [completion.job for completion in queue.take()] == [1, 2]
    assert queue.take() == []


def test_a_sleeping_loop_is_woken_by_another_thread():
    """Lesson 15: the loop sleeps in the system, on a descriptor, not in a busy loop."""
    queue = CompletionQueue()
    queue.fileno()
    thread = threading.Thread(target=queue.put, args=(make_completion(7),))

    thread.start()
    queue.wait(None)
    thread.join()

    assert [completion.job for completion in queue.take()] == [7]


def test_no_wake_up_is_lost():
    """A thousand completions come from four threads, and the loop sleeps whenever it can."""
    queue = CompletionQueue()
    queue.fileno()

    def put(start):
        for number in range(start, start + 250):
            queue.put(make_completion(number))

    threads = [threading.Thread(target=put, args=(250 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    taken: list[int] = []
    while len(taken) < 1000:
        queue.wait(None)
        taken += [completion.job for completion in queue.take()]
    for thread in threads:
        thread.join()

    assert sorted(taken) == list(range(1000))


def test_a_completion_before_the_first_wait_wakes_it_too():
    """The descriptor is made when it is first needed, and is readable at once if a completion
    waits."""
    queue = CompletionQueue()
    queue.put(make_completion(1))
    poller = select.poll()
    poller.register(queue.fileno(), select.POLLIN)

    assert poller.poll(0)
    queue.clear()
    assert not poller.poll(0)
    assert queue.has_any
    queue.clear()


def test_a_wait_ends_at_its_deadline():
    """The wait ends at its deadline, however late the copy."""
    queue = CompletionQueue()

    queue.wait(0.001)

    assert queue.take() == []


def test_a_late_completion_after_the_end_does_no_harm():
    """Closing twice is safe; a thread that reports later gets no error."""
    queue = CompletionQueue()
    queue.fileno()

    queue.close()
    queue.close()
    queue.put(make_completion(1))

    assert queue.has_any


def test_a_completion_while_the_queue_closes_is_written_to_no_closed_descriptor(monkeypatch):
    """The descriptor number may belong to another file by then, so writing and closing share a lock."""
    queue = CompletionQueue()
    queue.fileno()
    writing, closed = threading.Event(), threading.Event()
    write = os.eventfd_write

    def write_late(signal, value):
        writing.set()
        closed.wait(0.3)
        write(signal, value)

    monkeypatch.setattr(os, "eventfd_write", write_late)
    with ThreadPoolExecutor(1) as threads:
        told = threads.submit(queue.put, make_completion(1))
        assert writing.wait(5)
        queue.close()
        closed.set()
        told.result(5)

    assert queue.has_any
