"""One attempt: what its client has when the instance is lost."""

import asyncio
import json

import aiohttp

from headwater.clock import SystemClock
from headwater.server.continuation import FIELD, ContinuationMark, mark_line
from headwater.server.router.instance import Instance
from headwater.server.router.route_selector import RouteChoice
from headwater.server.router.stream_progress import StreamProgress
from headwater.server.router.upstream import Attempt, ForwardedRequest
from tests.router.registrations import make_registration

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def event(token):
    """The event of one token."""
    return mark_line(ContinuationMark(tokens=[token])) + b'data: {"token":%d}\n\n' % token


def test_a_slow_client_misses_nothing_when_the_instance_is_lost():
    """An event that waits for a slow client is sent to it, or the next instance generates it
    again. uvicorn waits before it writes, so an interrupted send has written nothing."""

    async def scenario():
        async def serve(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + event(1))
            await is_sent.wait()
            writer.write(event(2))
            await is_lost.wait()
            writer.close()

        sent, (is_sent, is_lost, is_blocked) = b"", (asyncio.Event() for _ in range(3))

        async def send(message):
            nonlocal sent
            if is_sent.is_set():
                is_blocked.set()
                await is_lost.wait()
            sent += message.get("body", b"")
            if sent:
                is_sent.set()

        server = await asyncio.start_server(serve, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        instance = Instance(make_registration(port=port), now=0.0)
        progress = StreamProgress()
        asked = ForwardedRequest(method="POST", path="/v1/completions", headers={}, body=b"{}")
        async with server, aiohttp.ClientSession() as session:
            route = RouteChoice(server=instance)
            attempt = Attempt(session, SystemClock(), route, send, progress)
            running = asyncio.create_task(attempt.run(asked))
            await is_blocked.wait()
            instance.lose()
            await asyncio.sleep(0)
            is_lost.set()
            failure = await running

        assert failure is not None
        (told,) = json.loads(progress.body(b"{}"))[FIELD]
        assert b"".join(b'data: {"token":%d}\n\n' % t for t in told["token_ids"]) == sent
        assert not instance.timeouts

    asyncio.run(asyncio.wait_for(scenario(), 60))
