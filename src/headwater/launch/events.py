"""Opens what tells others about the cache of one engine."""

from dataclasses import replace
from datetime import datetime

from headwater.clock import Clock
from headwater.config import EngineConfig
from headwater.engine.client import EngineInfo, KvEventsInfo
from headwater.engine.core import EngineCore


def open_events(
    config: EngineConfig, core: EngineCore, info: EngineInfo, clock: Clock
) -> EngineInfo:
    """Publish KV events of `core` where that is asked for; `info` with where they are heard."""
    wanted = config.kv_events
    if wanted is None or not wanted.is_on:
        return info
    # An engine that publishes nothing needs no ZMQ.
    from headwater.metrics.kv_publisher import KvPublisher

    publisher = KvPublisher(
        wanted,
        block_tokens=info.block_tokens,
        clock=clock,
        started_s=datetime.now().timestamp(),
        wake=core.completions.wake,
    )
    core.follow(publisher)
    heard = KvEventsInfo(
        endpoint=wanted.advertised_endpoint or publisher.endpoint,
        replay_endpoint=wanted.advertised_replay_endpoint or publisher.replay_endpoint,
        topic=wanted.topic,
        buffer_steps=wanted.buffer_steps,
    )
    return replace(info, kv_events=heard)
