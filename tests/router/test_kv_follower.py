"""Following an instance's events, from a publisher that knows only the format."""

import asyncio
import contextlib

import msgspec
import zmq
import zmq.asyncio

from headwater.disagg.routing import Trust
from headwater.server.router.instance import Instance
from headwater.server.router.kv_follower import KvEventFollower
from headwater.server.router.protocol import EventsAddress
from tests.router.registrations import make_registration

CLEARED = {"type": "AllBlocksCleared"}


def stored(*hashes, medium="GPU"):
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 4,
        "lora_id": None,
        "lora_name": None,
        "medium": medium,
    }


class Publisher:
    """Publishes given events, with any number."""

    def __init__(self, context):
        self._pub = context.socket(zmq.PUB)
        self._router = context.socket(zmq.ROUTER)
        self.endpoint = self._bind(self._pub)
        self.replay_endpoint = self._bind(self._router)

    def _bind(self, socket):
        socket.bind("tcp://127.0.0.1:*")
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def say(self, number, *events):
        await self._pub.send_multipart([b"", number.to_bytes(8, "big"), payload(*events)])

    async def say_raw(self, *frames):
        await self._pub.send_multipart(frames)

    async def answer(self, *batches):
        """Wait for a replay request and answer it; return the requested number."""
        async with asyncio.timeout(10):
            who, empty, start = await self._router.recv_multipart()
        assert empty == b""
        for number, *events in batches:
            frames = [who, b"", b"", number.to_bytes(8, "big"), payload(*events)]
            await self._router.send_multipart(frames)
        await self._router.send_multipart([who, b"", b"", b"\xff" * 8, b""])
        return int.from_bytes(start, "big")


def payload(*events):
    return msgspec.msgpack.encode([0.5, list(events), 0])


@contextlib.asynccontextmanager
async def followed(wait_s=2.0):
    """A publisher, and an instance that the router follows."""
    context = zmq.asyncio.Context()
    publisher = Publisher(context)
    told = make_registration(
        block_tokens=4,
        kv_events=EventsAddress(
            endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint
        ),
    )
    instance = Instance(told, now=0.0)
    follower = KvEventFollower(instance, context, wait_s=wait_s)
    try:
        yield publisher, instance
    finally:
        follower.close()
        await follower.ended()
        context.destroy(linger=0)


async def until(reached):
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110 -- a view has no event of its own
            await asyncio.sleep(0.005)


async def until_heard(publisher, view):
    """A subscription takes a moment: publish a known number until it is received."""
    async with asyncio.timeout(10):
        while view.trust is Trust.EXACT:
            await publisher.say(0, CLEARED)
            await asyncio.sleep(0.01)


def test_a_gap_is_asked_for_and_closed():
    """Lesson 71: missed events are replayed from the first missing number."""

    async def scenario():
        async with followed() as (publisher, instance):
            assert await publisher.answer((0, CLEARED), (1, stored(1))) == 0
            await until(lambda: instance.trust is Trust.EXACT)
            await until_heard(publisher, instance.view)

            await publisher.say(3, stored(3))
            assert await publisher.answer((2, stored(2)), (3, stored(3))) == 2

            await until(lambda: instance.view.next == 4)
            assert instance.trust is Trust.EXACT
            assert instance.view.match([1, 2, 3]) == 3
            assert instance.num_gaps == 1

    asyncio.run(scenario())


def test_a_gap_beyond_the_buffer_is_a_snapshot():
    """Lesson 71: the whole view is replaced by the snapshot, in every medium."""

    async def scenario():
        async with followed() as (publisher, instance):
            await publisher.answer((0, CLEARED), (1, stored(1)))
            await until(lambda: instance.trust is Trust.EXACT)
            await until_heard(publisher, instance.view)

            await publisher.say(90, stored(9))
            snapshot = (90, CLEARED, stored(7, 9), stored(8, medium="STORAGE"))
            assert await publisher.answer(snapshot) == 2

            await until(lambda: instance.view.next == 91)
            assert instance.view.blocks("GPU") == {7, 9}
            assert instance.view.blocks("STORAGE") == {8}

    asyncio.run(scenario())


def test_a_malformed_message_degrades_the_view_and_nothing_else():
    """Lesson 18: a malformed message counts as a gap and does not end the router."""

    async def scenario():
        async with followed() as (publisher, instance):
            await publisher.answer((0, CLEARED), (1, stored(1)))
            await until(lambda: instance.trust is Trust.EXACT)
            await until_heard(publisher, instance.view)

            for frames in ([b""], [b"", b"x", b"y"], [b"", bytes(8), b"\xc1"]):
                await publisher.say_raw(*frames)
                assert await publisher.answer() == 2
            await until(lambda: instance.trust is Trust.EXACT)
            assert instance.view.match([1]) == 1

    asyncio.run(scenario())


def test_a_quiet_instance_is_asked_now_and_then():
    """A lost last message, after which none shows the gap, is still noticed; without an answer
    the view is degraded until one comes."""

    async def scenario():
        async with followed(wait_s=0.1) as (publisher, instance):
            await publisher.answer((0, CLEARED))
            assert await publisher.answer((1, stored(5))) == 1
            await until(lambda: instance.view.match([5]) == 1)

            await until(lambda: instance.trust is Trust.DEGRADED)
            assert instance.view.match([5]) == 1
            while instance.trust is not Trust.EXACT:  # the earlier requests have timed out
                await publisher.answer()

    asyncio.run(scenario())
