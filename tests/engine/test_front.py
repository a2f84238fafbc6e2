"""The process split: a live engine process behind AsyncEngine, how it dies and how it ends."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import aclosing, asynccontextmanager

import numpy as np
import pytest

from headwater.engine.child import ChildProcess
from headwater.engine.client import GetStats, Pause, ResetCache, Resume
from headwater.engine.front import AsyncEngine
from headwater.engine.rundir import RunDir, sweep
from headwater.errors import (
    EngineDead,
    EngineRestarting,
    ModelError,
    PromptTooLong,
    QueueFull,
    RequestError,
)
from headwater.metrics.prometheus import render
from headwater.metrics.recorder import Recorder
from headwater.scheduler.request import Request, SamplingParams
from headwater.types import RequestId
from tests.engine.processes import OwnedEngine

pytestmark = pytest.mark.slow


def make_request(name="r", num_tokens=40, **params):
    return Request(
        request_id=RequestId(name),
        tokens=np.arange(num_tokens, dtype=np.int32),
        params=SamplingParams(**{"max_tokens": 8, "ignore_eos": True} | params),
        arrival_s=0.0,
    )


@asynccontextmanager
async def running_engine(**start):
    engine = await OwnedEngine(**start).start()
    try:
        yield engine
    finally:
        await engine.close()


async def tokens_of(engine, request):
    async with aclosing(engine.generate(request)) as outputs:
        return [token async for output in outputs for token in output.tokens]


def process_exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition):
    """Run the event loop until a condition is true; pytest's own timeout limits the wait."""
    while not await condition():  # noqa: ASYNC110 -- what changes is another process's state
        await asyncio.sleep(0)


async def until_waiting(engine, count):
    async def reached():
        return (await engine.control(GetStats())).num_waiting == count

    await until(reached)


def test_requests_run_side_by_side_and_the_engine_ends_cleanly():
    """Many requests share one engine process; closing stops it with 0 and leaves no socket."""

    async def scenario():
        engine = await OwnedEngine().start()
        answers = await asyncio.gather(
            *(tokens_of(engine, make_request(f"r{n}", 20 + n)) for n in range(20))
        )
        assert [len(tokens) for tokens in answers] == [8] * 20
        stats = await engine.control(GetStats())
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        await engine.close()
        assert engine.code == 0
        assert not engine.rundir.path.exists()

    asyncio.run(scenario())


def test_closing_the_iterator_aborts():
    """Lesson 58: a client that disconnects frees its slots; the loop continues for the
    others."""

    async def scenario():
        async with running_engine() as engine:
            outputs = engine.generate(make_request(max_tokens=400))
            await anext(outputs)
            await outputs.aclose()

            async def all_free():
                stats = await engine.control(GetStats())
                device = stats.tiers["device"]
                return stats.num_running == 0 and device.free + device.evictable == 64

            await until(all_free)
            assert len(await tokens_of(engine, make_request("next"))) == 8

    asyncio.run(scenario())


def test_an_abort_ends_the_stream_and_is_idempotent():
    """Lesson 58: an abort from outside ends the request with reason `abort`, at once."""

    async def scenario():
        async with running_engine() as engine:
            await engine.control(Pause())
            waiting = asyncio.create_task(collect(engine, make_request("w")))
            await asyncio.sleep(0)
            assert await engine.abort(["w", "unknown"]) == 1
            assert await engine.abort(["w"]) == 0
            assert (await waiting)[-1].finish_reason == "abort"
            assert await engine.abort(None) == 0

    asyncio.run(scenario())


async def collect(engine, request):
    return [output async for output in engine.generate(request)]


def test_pause_stops_admission_and_nothing_else():
    """Lesson 58: a paused engine answers, aborts and resets; it only admits no request."""

    async def scenario():
        async with running_engine() as engine:
            await engine.control(Pause())
            waiting = asyncio.create_task(tokens_of(engine, make_request()))

            async def one_waits():
                return (await engine.control(GetStats())).num_waiting == 1

            await until(one_waits)
            assert (await engine.control(GetStats())).is_paused
            await engine.control(ResetCache())
            await engine.control(Resume())
            assert len(await waiting) == 8

    asyncio.run(scenario())


def test_a_refusal_reaches_its_client_with_its_type():
    """A request that the engine refuses is the client's error, and only that request ends."""

    async def scenario():
        async with running_engine() as engine:
            with pytest.raises(PromptTooLong):
                await tokens_of(engine, make_request(num_tokens=4000))
            assert len(await tokens_of(engine, make_request())) == 8

    asyncio.run(scenario())


def test_two_live_requests_cannot_share_an_id():
    """The second request is refused; the first is not disturbed."""

    async def scenario():
        async with running_engine() as engine:
            await engine.control(Pause())
            first = asyncio.create_task(tokens_of(engine, make_request()))
            await asyncio.sleep(0)
            with pytest.raises(RequestError, match="already running"):
                await tokens_of(engine, make_request())
            await engine.control(Resume())
            assert len(await first) == 8

    asyncio.run(scenario())


def test_every_client_gets_an_error_at_once_when_the_engine_is_killed():
    """Every waiting client and call gets EngineDead with the reason; later ones fail at
    once."""

    async def scenario():
        async with running_engine() as engine:
            await engine.control(Pause())
            waiting = [
                asyncio.create_task(tokens_of(engine, make_request(f"r{n}"))) for n in range(3)
            ]
            await asyncio.sleep(0)
            os.kill(engine.pid, signal.SIGKILL)
            errors = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(error, EngineDead) for error in errors)
            assert "signal 9" in await engine.wait_dead()
            assert engine.dead is not None
            with pytest.raises(EngineDead):
                await engine.control(GetStats())
            with pytest.raises(EngineDead):
                await tokens_of(engine, make_request("late"))

    asyncio.run(scenario())


def test_a_double_free_is_counted_and_ends_the_engine():
    """Lesson 7: in production, too, clients get an error and `/metrics` counts the double
    free."""

    async def scenario():
        engine = await OwnedEngine(command=["tests.engine.careless"]).start()
        before = engine.num_violations
        with pytest.raises(EngineDead, match="InvariantError: slot 63 is FREE, not HELD"):
            await tokens_of(engine, make_request())
        await engine.close()

        scrape = render(
            Recorder(), None, block_tokens=16, num_violations=engine.num_violations
        ).decode()
        assert (before, engine.num_violations) == (0, 1)
        assert "headwater:invariant_violations_total 1.0" in scrape

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        (b'{"fail": "this model cannot be served"}', ModelError, "this model cannot be served"),
        (b'{"raise": "boom"}', EngineDead, "the engine died: ZeroDivisionError: boom"),
    ],
)
def test_a_failed_start_raises_the_real_message_and_leaves_nothing(settings, error, sentence):
    """Lesson 61: there is the error and an exit code of 1, and no process, socket or half-built
    engine is left."""

    async def scenario():
        engine = OwnedEngine(settings)
        with pytest.raises(error, match=sentence):
            await engine.start()
        assert not process_exists(engine.pid)
        assert not engine.rundir.path.exists()

    asyncio.run(scenario())


def test_an_engine_that_does_not_start_in_time_is_ended():
    """Lesson 61: a start that takes too long is an error, and its process does not stay."""

    async def scenario():
        engine = OwnedEngine()
        with pytest.raises(EngineDead, match="not ready"):
            await engine.start(timeout_s=0.0)
        assert not process_exists(engine.pid)

    asyncio.run(scenario())


def test_processes_are_started_from_the_main_thread_only():
    """Lesson 16: starting an engine process from another thread is refused before anything is
    made."""
    caught = []

    def start():
        try:
            ChildProcess(["headwater"])
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

    assert caught == ["processes are started from the main thread only"]


def test_an_engine_does_not_outlive_its_server():
    """When a server is killed, its engine and its socket folder go with it."""
    script = (
        "import asyncio\n"
        "from tests.engine.processes import OwnedEngine\n"
        "async def main():\n"
        "    engine = await OwnedEngine().start()\n"
        "    print(engine.pid, engine.rundir.path, flush=True)\n"
        "    await engine.wait_dead()\n"
        "asyncio.run(main())\n"
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid_text, folder = server.stdout.readline().split()
    engine = os.pidfd_open(int(pid_text))

    server.kill()
    server.communicate()

    # The descriptor of a process becomes readable when it has ended: no polling, no sleep.
    assert select.select([engine], [], [], 30)[0]
    os.close(engine)
    assert not os.path.exists(folder)


def test_socket_folders_are_private_and_unique(tmp_path):
    """Lesson 60: each engine has a folder with its own name, and no other user can look into
    it."""
    first, second = RunDir(tmp_path), RunDir(tmp_path)

    assert first.path != second.path
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_folders_of_dead_processes_are_removed_and_of_running_ones_are_not(tmp_path):
    """Lesson 60: what a crash left behind is removed at the next start."""
    living = RunDir(tmp_path)
    dead = tmp_path / "headwater-dead"
    dead.mkdir()
    (dead / "lock").touch()
    foreign = tmp_path / "headwater-notours"
    foreign.mkdir()

    assert sweep(tmp_path) == 1

    assert not dead.exists()
    assert living.path.exists()
    assert foreign.exists()  # no lock in it: not one of ours
    living.close()


def test_a_device_that_hangs_is_declared_dead_and_clients_are_told():
    """The loop's thread is stuck in the runner; the watchdog reports it and ends the process.
    Waiting requests and control calls get the reason, and so do later ones."""

    async def scenario():
        engine = await OwnedEngine(b'{"hang_after_s": 0.5}').start()
        idle = await engine.control(GetStats())
        assert idle.num_running == 0
        request = asyncio.ensure_future(tokens_of(engine, make_request("stuck")))
        reason = await engine.wait_dead()
        assert "step 1 did not end within 0.5 s: the device hangs" in reason
        with pytest.raises(EngineDead, match="did not end within"):
            await request
        with pytest.raises(EngineDead, match="did not end within"):
            await engine.control(GetStats())

        async def ended():
            return not process_exists(engine.pid)

        await until(ended)
        await engine.close()

    asyncio.run(scenario())


def test_each_worker_gets_its_own_outputs_and_the_limit_is_for_all_of_them():
    """For two clients of one engine, equal ids do not mix, and the limit applies to both
    together."""

    async def scenario():
        async with running_engine(max_queued=0) as engine:
            other = AsyncEngine("1.0")
            other.attach(engine.process.address, engine.info)
            answers = await asyncio.gather(
                *(tokens_of(engine, make_request(f"a{n}", 20 + n)) for n in range(4)),
                *(tokens_of(other, make_request(f"b{n}", 20 + n)) for n in range(4)),
            )
            assert answers[:4] == answers[4:]
            await engine.control(Pause())
            waiting = [
                asyncio.create_task(tokens_of(client, make_request(f"{name}{n}")))
                for name, client in (("c", engine), ("d", other))
                for n in range(4)
            ]
            await until_waiting(engine, 8)
            with pytest.raises(QueueFull, match="8 sequences are running or waiting"):
                await tokens_of(other, make_request("one more"))
            await engine.control(Resume())
            assert len(await asyncio.gather(*waiting)) == 8
            await other.close()

    asyncio.run(scenario())


def test_the_requests_of_a_worker_that_is_gone_are_aborted():
    """The supervisor tells the engine; other requests are not disturbed, and the slots are free
    again."""

    async def scenario():
        async with running_engine(max_queued=0) as engine:
            other = AsyncEngine("1.0")
            other.attach(engine.process.address, engine.info)
            await engine.control(Pause())
            mine = asyncio.create_task(tokens_of(engine, make_request("mine")))
            lost = asyncio.create_task(tokens_of(other, make_request("lost")))
            await until_waiting(engine, 2)
            await other.close()
            engine.process.tell_gone("1.0")
            await until_waiting(engine, 1)
            await engine.control(Resume())
            assert len(await mine) == 8
            with pytest.raises(EngineDead):
                await lost

    asyncio.run(scenario())


def test_a_client_continues_with_the_next_engine():
    """The first engine is killed; calls report that another engine is being started; then that
    engine serves."""

    async def scenario():
        async with running_engine() as first, running_engine() as second:
            client = AsyncEngine("9.0")
            client.attach(first.process.address, first.info)
            assert len(await tokens_of(client, make_request())) == 8
            client.lose("signal 9", retry_after_s=3.0)
            with pytest.raises(EngineRestarting, match="restarting: signal 9") as caught:
                client.check_alive()
            assert caught.value.retry_after_s == 3.0
            client.attach(second.process.address, second.info)
            assert len(await tokens_of(client, make_request())) == 8
            await client.close()

    asyncio.run(scenario())
