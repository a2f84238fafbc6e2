"""The Dynamo worker: a real Headwater server behind Dynamo's engine interface."""

import asyncio
from types import SimpleNamespace

import pytest

from headwater.device import builtin
from headwater.errors import ConfigError
from headwater.plugins.dynamo.engine import HeadwaterEngine

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
    """It has tokens, usage with cached tokens, the block size for the router, and a private
    event socket. Cached blocks do not count as load: Dynamo would take a worker with a full
    cache for a busy one."""

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
