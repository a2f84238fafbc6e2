"""Opens the publisher of KV events of one engine."""

import logging
from dataclasses import replace
from datetime import datetime

from headwater.clock import Clock
from headwater.config import EngineConfig, peer_token_from_environment
from headwater.engine.client import EngineInfo, KvEventsInfo
from headwater.engine.core import EngineCore
from headwater.errors import ConfigError

log = logging.getLogger(__name__)


def open_events(
    config: EngineConfig, core: EngineCore, info: EngineInfo, clock: Clock
) -> EngineInfo:
    """Publish KV events of `core` if they are configured; return `info` with their
    endpoints."""
    wanted = config.kv_events
    if wanted is None or not wanted.is_on:
        return info
    token = peer_token_from_environment()
    if wanted.needs_secret and token is None:
        raise ConfigError(
            "--kv-events-config would publish prompts or reach other hosts without "
            'authentication: set HEADWATER_PEER_TOKEN, or set "insecure": true for consumers '
            "that do not support ZMQ CURVE"
        )
    if wanted.insecure:
        log.warning(
            "KV events are published without authentication: every process that can connect "
            "learns which prefixes are cached%s: endpoint=%s",
            ", and the prompts themselves" if wanted.token_ids else "",
            wanted.endpoint,
        )
    # Imported here: an engine that publishes nothing needs no ZMQ.
    from headwater.metrics.kv_curve import CurveKeys
    from headwater.metrics.kv_publisher import KvPublisher

    keys = None if token is None or wanted.insecure else CurveKeys.of_token(token)
    publisher = KvPublisher(
        wanted,
        block_tokens=info.block_tokens,
        clock=clock,
        started_s=datetime.now().timestamp(),
        wake=core.completions.wake,
        keys=keys,
    )
    core.follow(publisher)
    heard = KvEventsInfo(
        endpoint=wanted.advertised_endpoint or publisher.endpoint,
        replay_endpoint=wanted.advertised_replay_endpoint or publisher.replay_endpoint,
        topic=wanted.topic,
        buffer_steps=wanted.buffer_steps,
        curve=keys is not None,
        token_ids=wanted.token_ids,
    )
    return replace(info, kv_events=heard)
