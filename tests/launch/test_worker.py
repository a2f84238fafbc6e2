"""What one HTTP worker does with messages of the supervisor."""

import asyncio
from typing import Any

import msgspec

from headwater.config import EngineConfig
from headwater.launch.worker import Worker
from headwater.launch.worker_start import EngineUp, WorkerStart
from headwater.server.config import ServerConfig
from headwater.server.connection_counts import make_counts_file
from headwater.server.listener import bind
from headwater.testing.engines import make_echo_info, make_tokenizer_folder


def test_two_engines_that_start_while_a_worker_opens_open_it_once(tmp_path):
    """The second engine comes while the tokenizer is loaded; the worker has one application and
    one sampler."""

    async def scenario():
        listener = bind("127.0.0.1", 0)
        start = WorkerStart(
            name="0.0",
            listener=listener.detach(),
            index=0,
            connections=make_counts_file(1),
            engine=EngineConfig(),
            server=ServerConfig(),
            is_leader=True,
        )
        channel: Any = None  # nothing is said to the supervisor
        worker = Worker(start, lambda: channel)
        info = make_echo_info(str(make_tokenizer_folder(tmp_path / "model")))
        serving = asyncio.create_task(worker.serve())
        await asyncio.gather(*(worker.calls["engine_up"](up(info, n)) for n in (0, 1)))

        tasks = [repr(task) for task in asyncio.all_tasks()]
        assert sum("HistorySampler.run" in task for task in tasks) == 1
        worker.events["stop"]()
        await serving

    asyncio.run(scenario())


def up(info, num_restarts):
    """The message for the engine after this many restarts."""
    message = EngineUp(
        address=f"inproc://engine-{num_restarts}",
        info=info,
        created_s=0.0,
        started_s=0.0,
        num_restarts=num_restarts,
        num_violations=0,
    )
    return msgspec.to_builtins(message)
