"""Several HTTP workers accept from one socket; here they share one event loop."""

import asyncio
import os
import socket
from typing import Any

import pytest

from headwater.server import balanced_listener
from headwater.server.balanced_listener import BalancedListener, CountedConnection
from headwater.server.connection_counts import ConnectionCounts, make_counts_file
from headwater.server.listener import bind

NUM_WORKERS = 3


class Counted(CountedConnection):
    """A connection that is counted for one worker, as `GuardedProtocol` does."""

    def __init__(self, counts):
        self.counts = counts

    def accepted(self, address, drop):
        self.counts.add("client", 1)
        return True

    def ended(self):
        self.counts.add("client", -1)

    def connection_lost(self, error):
        self.ended()


class Workers:
    """Listeners of a shared socket, each with its own counts."""

    def __init__(self, num_workers=NUM_WORKERS):
        self.file = make_counts_file(num_workers)
        self.counts = [ConnectionCounts(self.file, index) for index in range(num_workers)]
        self.socket = bind("127.0.0.1", 0)
        self.opened = []

    def start(self, index):
        counts = self.counts[index]
        # A descriptor of its own, because one event loop can watch a descriptor only once.
        own = self.socket.dup()
        return own, BalancedListener(own, lambda: Counted(counts), counts, None)

    async def open(self, count):
        for _ in range(count):
            _, writer = await asyncio.open_connection(*self.socket.getsockname())
            self.opened.append(writer)

    async def all_counted(self, count):
        async with asyncio.timeout(30):
            while sum(self.numbers) < count:  # noqa: ASYNC110 -- the counts are plain memory
                await asyncio.sleep(0)

    @property
    def numbers(self):
        return [int(counts._own[0]) for counts in self.counts]

    async def close(self, started):
        for writer in self.opened:
            writer.close()
        for own, listener in started:
            listener.close()
            listener.close()
            await listener.wait_closed()
            own.close()
        self.socket.close()
        os.close(self.file)


def test_workers_get_about_as_many_connections():
    """One worker has 20 connections already, so the next ones go to the others."""

    async def scenario():
        workers = Workers()
        workers.counts[0].add("client", 20)
        await workers.open(46)
        started = [workers.start(index) for index in range(NUM_WORKERS)]
        await workers.all_counted(66)
        numbers = workers.numbers
        await workers.close(started)
        return numbers

    numbers = asyncio.run(scenario())
    assert sum(numbers) == 66
    assert max(numbers) - min(numbers) <= 3


def test_one_worker_leaves_no_connection_to_others(monkeypatch):
    """Connections that come together are accepted together. With pauses between them, the first
    tokens of requests that came together were up to twice as late."""
    monkeypatch.setattr(balanced_listener, "_YIELD_S", 3600.0)

    async def run():
        workers = Workers(num_workers=1)
        started = [workers.start(0)]
        clients = [socket.create_connection(workers.socket.getsockname()) for _ in range(8)]
        await workers.all_counted(8)
        assert workers.numbers == [8]
        for client in clients:
            client.close()
        await workers.close(started)

    asyncio.run(run())


def test_a_worker_that_accepts_nothing_does_not_keep_connections_from_the_others(monkeypatch):
    """The worker hangs or starts. The others take its connections after one moment, not after one
    for each connection."""
    monkeypatch.setattr(balanced_listener, "_YIELD_S", 0.5)

    async def scenario():
        workers = Workers(2)
        started = [workers.start(0)]  # worker 1 never accepts
        await workers.open(20)
        async with asyncio.timeout(5):
            await workers.all_counted(20)
        numbers = workers.numbers
        await workers.close(started)
        return numbers

    assert asyncio.run(scenario()) == [20, 0]


def test_an_accept_that_fails_is_tried_again(monkeypatch):
    """With too many open files the connection waits and the error is logged, without a busy
    loop."""
    monkeypatch.setattr("headwater.server.balanced_listener._RETRY_S", 0.0)

    class Failing:
        """A socket whose first accept fails."""

        def __init__(self, listener):
            self.listener = listener
            self.num_failed = 0

        def accept(self):
            if not self.num_failed:
                self.num_failed += 1
                raise OSError(24, "Too many open files")
            return self.listener.accept()

        def __getattr__(self, name):
            return getattr(self.listener, name)

    async def scenario():
        workers = Workers(1)
        counts = workers.counts[0]
        failing = Failing(workers.socket.dup())
        accepting: Any = failing
        listener = BalancedListener(accepting, lambda: Counted(counts), counts, None)
        await workers.open(1)
        await workers.all_counted(1)
        await workers.close([(failing, listener)])
        return failing.num_failed

    assert asyncio.run(scenario()) == 1


@pytest.mark.parametrize("counts", [[0, 0, 0], [5, 2, 9]])
def test_the_lead_is_over_the_worker_with_the_fewest_connections(counts):
    """One worker alone never leads."""
    file = make_counts_file(len(counts))
    rows = [ConnectionCounts(file, index) for index in range(len(counts))]
    for row, count in zip(rows, counts, strict=True):
        row.add("client", count)
    assert [row.lead for row in rows] == [count - min(counts) for count in counts]
    os.close(file)
    assert ConnectionCounts.alone().lead == 0
