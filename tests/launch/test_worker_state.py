"""What the supervisor keeps for its HTTP workers."""

import asyncio
import contextlib
import socket

from headwater.clock import SystemClock
from headwater.launch.process_channel import ProcessChannel
from headwater.launch.worker_state import RemoteState, WorkerSession, WorkersState
from headwater.server.fair_share import FairShare
from headwater.server.response_store import ResponseStore


async def open_channels(session):
    """The supervisor's and the worker's end of one connection."""
    streams = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
    return (
        ProcessChannel(*streams[0], session.calls, session.events),
        ProcessChannel(*streams[1], {}, {}),
    )


def test_a_request_that_is_cancelled_at_once_keeps_no_place_in_the_engine():
    """The call of the request and its cancellation arrive together."""

    async def scenario():
        store = ResponseStore(max_responses=0, max_bytes=0, lifetime_s=1.0)
        state = WorkersState(store, SystemClock())
        state.fair_share = FairShare(1)
        session = WorkerSession("0", state)
        supervisor, worker = await open_channels(session)
        session.attach(supervisor)
        remote = RemoteState(lambda: worker)

        async def ask():
            async with remote.enter_engine("key", 1.0, 1):
                return True

        lost = asyncio.create_task(ask())
        await asyncio.sleep(0)  # the call is sent, and the supervisor does not read yet
        lost.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await lost
        running = [asyncio.create_task(end.run()) for end in (supervisor, worker)]
        async with asyncio.timeout(30):
            assert await ask()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(scenario())


def test_calls_and_events_begin_in_the_order_in_which_they_were_sent():
    """An engine that dies as soon as it is up: its end is handled after its start, although both
    messages wait together. Otherwise a worker would use the dead engine."""

    async def scenario():
        seen = []

        async def up():
            seen.append("up")

        ends = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
        supervisor = ProcessChannel(*ends[0], {}, {})
        worker = ProcessChannel(*ends[1], {"up": up}, {"down": lambda: seen.append("down")})
        listening = asyncio.create_task(supervisor.run())
        called = asyncio.create_task(supervisor.call("up"))
        await asyncio.sleep(0)
        supervisor.tell("down")
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(30):
            await called
        assert seen == ["up", "down"]
        for task in (listening, running):
            task.cancel()
        await asyncio.gather(listening, running, return_exceptions=True)

    asyncio.run(scenario())
