"""The Dynamo worker: a real Headwater server behind Dynamo's engine interface."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from headwater.device import builtin
from headwater.errors import ConfigError, QueueFull
from headwater.plugins.dynamo.engine import HeadwaterEngine
from headwater.plugins.dynamo.server import OwnServer
from tests.waiting import until

CONTEXT = SimpleNamespace(id=lambda: "request-1")


class Publisher:
    """Takes the load that a worker reports."""

    def __init__(self):
        self.last = None
        self.is_idle = asyncio.Event()

    def publish(self, rank, snapshot):
        self.last = rank, snapshot
        if snapshot.kv_used_blocks == 0:
            self.is_idle.set()
        else:
            self.is_idle.clear()


async def collect(engine, tokens, **options):
    request = {"token_ids": tokens, "stop_conditions": {"max_tokens": 4}, **options}
    return [chunk async for chunk in engine.generate(request, CONTEXT)]


@pytest.mark.slow
def test_a_dynamo_worker_serves_reports_its_load_and_publishes_events():
    """Answers have tokens and usage with cached tokens; the router gets the block size and a
    private event socket. Cached blocks do not count as load: Dynamo would take a worker with a
    full cache for a busy one."""

    async def scenario():
        flags = ["--", "--num-gpu-blocks-override", "64", "--block-size", "16"]
        engine, config = await HeadwaterEngine.from_args(
            [str(builtin.ensure()), "--served-model-name", "m", *flags]
        )
        publisher = Publisher()
        engine.attach_snapshot_publisher(publisher)
        try:
            registered = await engine.start(1)
            prompt = [65 + i % 26 for i in range(100)]
            cold = await collect(
                engine, prompt, sampling_options={"temperature": 0, "top_k": -1}
            )
            warm = await collect(engine, prompt, sampling_options={"temperature": 0})
            [source] = await engine.kv_event_sources()
            publisher.is_idle.clear()  # set before the first request
            await asyncio.wait_for(publisher.is_idle.wait(), 20)
        finally:
            await engine.cleanup()
        return config, registered, cold, warm, source, publisher

    config, registered, cold, warm, source, publisher = asyncio.run(scenario())

    assert (config.served_model_name, config.discovery_backend) == ("m", "file")
    assert (registered.llm.kv_cache_block_size, registered.llm.total_kv_blocks) == (16, 64)
    tokens = [token for chunk in cold for token in chunk["token_ids"]]
    assert tokens == [token for chunk in warm for token in chunk["token_ids"]]
    assert (len(tokens), cold[-1]["finish_reason"]) == (4, "length")
    assert cold[-1]["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert warm[-1]["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
    assert source.endpoint.startswith("ipc://")
    rank, snapshot = publisher.last
    assert (rank, snapshot.kv_total_blocks, snapshot.kv_used_blocks) == (0, 64, 0)


@pytest.mark.slow
def test_a_server_that_cannot_start_is_an_error_and_leaves_nothing_behind(tmp_path):
    """The worker ends with the reason; its server and folder are gone."""

    async def scenario():
        engine, _ = await HeadwaterEngine.from_args([str(tmp_path / "missing"), "--", "--port"])
        with pytest.raises(ConfigError, match="ended with"):
            await engine.start(1)
        await engine.cleanup()
        await engine.cleanup()

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def worker_before(answer):
    """A worker whose server is `answer`, a handler of POST /v1/completions."""
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server = OwnServer(None, [])
    server.connect(f"http://127.0.0.1:{runner.addresses[0][1]}")
    engine = HeadwaterEngine("m", "m", server)
    try:
        yield engine
    finally:
        await engine.cleanup()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (400, "the prompt is too long", InvalidArgument),
        (429, "the queue is full", QueueFull),
        (503, "the engine restarts", EngineShutdown),
        (200, 'data: {"error": {"message": "out of memory"}}\n\n', EngineShutdown),
    ],
)
def test_errors_of_the_server_reach_dynamo_by_kind(status, text, error):
    """A wrong request is the client's fault. After a failure of the engine, also in the middle
    of a stream, Dynamo tries another worker."""

    async def scenario():
        async def answer(request):
            return web.Response(status=status, text=text)

        async with worker_before(answer) as engine:
            with pytest.raises(error):
                await collect(engine, [1, 2, 3])

    asyncio.run(scenario())


def body_for(**request):
    """The request that the server gets for one of Dynamo's with a prompt of three tokens, in a
    context of 100."""
    bodies = []

    async def scenario():
        async def answer(request):
            bodies.append(await request.json())
            return web.Response(text="")

        async with worker_before(answer) as engine:
            engine._context_length = 100
            given = {"token_ids": [1, 2, 3], **request}
            assert not [chunk async for chunk in engine.generate(given, CONTEXT)]

    asyncio.run(scenario())
    return bodies[0]


def test_an_answer_without_a_limit_may_fill_the_context():
    """The default of the completions API, 16 tokens, is not Dynamo's."""
    assert body_for()["max_tokens"] == 97
    assert body_for(stop_conditions={"max_tokens": 5})["max_tokens"] == 5


def test_constraints_and_all_stop_tokens_reach_the_server():
    """Dynamo's guided decoding becomes `structured_outputs`; visible and hidden stop tokens
    both stop."""
    guided = {"json": {"type": "object"}, "regex": None, "backend": "any"}
    body = body_for(
        sampling_options={"guided_decoding": guided},
        stop_conditions={"stop_token_ids": [7], "stop_token_ids_hidden": [5, 7]},
    )

    assert body["structured_outputs"] == {"json": {"type": "object"}}
    assert body["stop_token_ids"] == [5, 7]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"output_options": {"logprobs": 0}}, "not support logprobs"),
        ({"stop_conditions": {"max_thinking_tokens": 8}}, "not support max_thinking_tokens"),
        ({"multi_modal_data": {"image": ["x"]}}, "not support multi_modal_data"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": "x"}}}, "structural_tag"),
    ],
)
def test_what_an_answer_would_silently_lack_is_refused(request_, message):
    """Dynamo gives the message to the client as an error of the request."""
    with pytest.raises(InvalidArgument, match=message):
        body_for(**request_)


def test_streams_of_a_worker_have_no_limit_in_number_or_time():
    """All requests that Dynamo sends reach the server at once, which has limits of its own."""
    num_streams = 150

    async def scenario():
        arrived, all_here = 0, asyncio.Event()

        async def answer(request):
            nonlocal arrived
            arrived += 1
            if arrived == num_streams:
                all_here.set()
            await all_here.wait()
            return web.Response(text="")

        async with worker_before(answer) as engine, asyncio.timeout(60):
            await asyncio.gather(*(collect(engine, [1]) for _ in range(num_streams)))
            assert engine._server._http.timeout.total is None

    asyncio.run(scenario())


WORKER = """
import asyncio, sys
from headwater.plugins.dynamo.server import OwnServer

async def run():
    server = OwnServer(None, ["--num-gpu-blocks-override", "64"])
    start = asyncio.ensure_future(server.start())
    while server._process is None or (sys.argv[1] != "starts" and not start.done()):
        await asyncio.sleep(0.01)
    open(sys.argv[2], "w").close()
    if sys.argv[1] == "fails":
        raise RuntimeError("the runtime of the worker has failed")
    await asyncio.Event().wait()

asyncio.run(run())
"""


def processes_with(entry):
    """Running processes whose environment had `entry` when they were started."""
    return [path.parent for path in Path("/proc").glob("[0-9]*/environ") if has(path, entry)]


def has(path, entry):
    try:
        return entry.encode() in path.read_bytes().split(b"\0")
    except OSError:  # it has ended since
        return False


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starts", "serves", "fails"])
def test_a_worker_that_is_killed_or_fails_leaves_no_process(moment, tmp_path):
    """The worker gets SIGKILL while its server starts or serves, or has an error that skips its
    cleanup. The server and its processes end with the worker."""
    mark = f"HEADWATER_TEST_WORKER={tmp_path}"
    name, value = mark.split("=", 1)
    reached = tmp_path / "reached"
    command = [sys.executable, "-c", WORKER, moment, str(reached)]
    with subprocess.Popen(command, env=os.environ | {name: value}) as worker:
        until(reached.exists, within_s=120)
        if moment != "fails":
            assert len(processes_with(mark)) > 1
            worker.kill()
        worker.wait()

    until(lambda: not processes_with(mark), within_s=60, pause_s=0.2)


@pytest.mark.slow
def test_a_worker_stops_when_its_server_has_ended():
    """Dynamo would go on sending requests to a worker without a server."""

    async def scenario():
        stopping = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
        engine, _ = await HeadwaterEngine.from_args([str(builtin.ensure())])
        try:
            await engine.start(1)
            assert engine._server._process is not None
            os.kill(engine._server._process.pid, signal.SIGKILL)
            await asyncio.wait_for(stopping.wait(), 20)
        finally:
            await engine.cleanup()

    asyncio.run(scenario())
