"""`headwater serve`: converts flags to settings, refuses wrong ones, and prints the banner."""

import json
import os
import sys
from argparse import Namespace
from contextlib import closing
from dataclasses import fields, replace
from typing import Any

import msgspec

from headwater import __version__
from headwater.cli.idle_flags import idle_settings
from headwater.cli.security import (
    TLS_FLAGS,
    allowed_hosts_of,
    api_key_of,
    commands_to_try,
    peer_token_of,
    tls_of,
)
from headwater.config import (
    MIB,
    EngineConfig,
    KvEventsConfig,
    PeersConfig,
)
from headwater.errors import ConfigError
from headwater.launch.hub import find_model
from headwater.launch.parent_watch import watch_parent
from headwater.launch.signals import StopSignals
from headwater.launch.supervisor import Serving, serve
from headwater.metrics.logs import set_up_logs
from headwater.server.config import LimitsConfig, ServerConfig, is_clear_text
from headwater.server.listener import bind
from headwater.words import suggest

_MAX_DEFAULT_WORKERS = 8


def run_serve(options: Namespace, given: frozenset[str]) -> int:
    """Serve until stopped; return the exit code. `given` are the flags on the command line."""
    set_up_logs(options.log_format)
    watch_parent(os.environ)
    server = server_config(options)
    found = find_model(options.model, options.revision)
    engine = replace(engine_config(options), model=found.folder, model_name=found.name)
    for sentence in idle_settings(engine, given):
        _say(f"note: {sentence}")
    if "--peer-token" in given and not server.routers and engine.peers is None:
        _say("note: --peer-token does nothing here: give --router or --splitwise-role")
    if not server.is_loopback and not server.needs_key:
        _say(
            f"note: any client that can reach {server.host} can use this server; see --api-key"
        )
    for router in server.routers:
        if is_clear_text(router):
            _say(
                f"note: {router} is not encrypted: other hosts can read prompts; see docs/security.md"
            )
    signals = StopSignals()
    with closing(bind(server.host, server.port)) as listener:
        _say(f"loading {options.model or 'the built-in tiny model'}")
        return serve(
            engine,
            server,
            listener,
            lambda serving: _say(banner(serving, engine, server)),
            signals,
            record=options.record,
        )


def engine_config(options: Namespace) -> EngineConfig:
    """The engine's part of the flags."""
    return EngineConfig(
        model=options.model,
        dtype=options.dtype,
        kv_cache_dtype=options.kv_cache_dtype,
        device=options.device,
        tensor_parallel_size=options.tensor_parallel_size,
        num_threads=options.threads,
        block_tokens=options.block_size,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_batched_tokens=options.max_num_batched_tokens,
        max_itl_ms=options.max_itl_ms,
        memory_utilization=options.gpu_memory_utilization,
        num_blocks_override=options.num_gpu_blocks_override,
        prefix_caching=options.enable_prefix_caching,
        output_caching=options.enable_output_caching,
        eviction=options.eviction,
        eviction_weights=options.eviction_weights,
        hint_budget=options.hint_budget,
        prefetch_sessions=options.prefetch_sessions,
        scheduling_policy=options.scheduling_policy,
        swap_space_gib=options.swap_space,
        write_policy=options.write_policy,
        save_preempted=options.save_preempted,
        load_policy=options.load_policy,
        load_timeout_s=options.load_timeout,
        step_timeout_s=options.step_timeout,
        storage_backend=options.kvcache_storage_backend,
        peers=_peers(options),
        storage_config=_settings("--kvcache-storage-config", options.kvcache_storage_config),
        # An instance registers at a router so that the router knows what it has cached.
        kv_events=_kv_events(options.kv_events_config or ("{}" if options.router else None)),
    )


def server_config(options: Namespace) -> ServerConfig:
    """The server's part of the flags."""
    return ServerConfig(
        host=options.host,
        port=options.port,
        served_model_name=options.served_model_name,
        api_key=api_key_of(options),
        api_keys_file=options.api_keys_file,
        allowed_hosts=allowed_hosts_of(options),
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        tls=tls_of(options),
        drain_timeout_s=options.drain_timeout,
        api_workers=_api_workers(options),
        max_engine_restarts=options.max_engine_restarts,
        vllm_metric_names=options.vllm_metric_names,
        key_metrics=options.key_metrics,
        routers=tuple(url.rstrip("/") for url in options.router),
        instance_name=options.instance_name,
        peer_token=peer_token_of(options),
        log_format=options.log_format,
        limits=LimitsConfig(
            max_body_bytes=round(options.max_body_mib * MIB),
            max_queued=options.max_queued_requests,
            max_stored_responses=options.max_stored_responses,
            stored_lifetime_s=options.stored_response_lifetime,
        ),
    )


def _api_workers(options: Namespace) -> int:
    """Number of HTTP workers. An engine on the CPU needs the cores itself, and one worker is
    fast enough for it."""
    if options.api_workers is not None:
        return int(options.api_workers)
    if options.device == "cpu":
        return 1
    return min(max(1, len(os.sched_getaffinity(0)) // 4), _MAX_DEFAULT_WORKERS)


def _peers(options: Namespace) -> PeersConfig | None:
    """Settings of hand-offs, if a role is given."""
    if options.splitwise_role is None:
        return None
    return PeersConfig(
        role=options.splitwise_role,
        link=options.cache_transfer_protocol,
        host=options.peer_host,
        port=options.peer_port,
        advertise_host=options.peer_advertise_host,
        advertise_port=options.peer_advertise_port,
        link_host=options.link_host,
        link_port=options.link_port,
        link_advertise_host=options.link_advertise_host,
        link_advertise_port=options.link_advertise_port,
        lease_s=options.peer_lease,
        max_inflight=options.max_inflight_prefill,
        **_peer_tls(options),
    )


def _peer_tls(options: Namespace) -> dict[str, str]:
    """Files of mutual TLS with peers; empty without a CA, because peers could not be
    verified."""
    files = {name: getattr(options, name) for name in TLS_FLAGS}
    return {name: path for name, path in files.items() if path and files["ssl_ca_certs"]}


def _kv_events(text: str | None) -> KvEventsConfig | None:
    """How KV events are published; None without the flag."""
    if text is None:
        return None
    settings = _settings("--kv-events-config", text)
    known = [field.name for field in fields(KvEventsConfig)]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"--kv-events-config has no setting {name!r}{suggest(name, known)}"
            )
    try:
        return msgspec.convert(settings, KvEventsConfig)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"--kv-events-config: {exc}") from exc


def _settings(flag: str, text: str | None) -> dict[str, Any]:
    """Settings that a flag gives as JSON; empty without the flag."""
    if text is None:
        return {}
    try:
        settings = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"{flag} is not JSON: {exc}") from exc
    if not isinstance(settings, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text}")
    return settings


def banner(serving: Serving, engine: EngineConfig, server: ServerConfig) -> str:
    """What is served, where, how much the cache holds, and a command to try."""
    info = serving.info
    num_tokens = info.num_device_blocks * info.block_tokens
    messages = [{"role": "user", "content": "Hello"}]
    body = json.dumps({"model": serving.model_name, "messages": messages, "max_tokens": 20})
    caching = (
        f"prefixes of {info.min_prefix_tokens} tokens and more are reused"
        if engine.prefix_caching
        else "prefix caching is off"
    )
    curl, top, heading = commands_to_try(
        serving.url,
        needs_key=server.needs_key,
        ca_certs=None if server.tls is None else server.tls.ssl_ca_certs,
    )
    tiers = "".join(f"\n  {line}" for line in info.tiers)
    if engine.peers is not None and info.peer_address:
        tiers += (
            f"\n  peers   {info.role} at {info.peer_address}, blocks over {engine.peers.link}"
        )
    return f"""\
Headwater {__version__} is ready at {serving.url}
  model   {serving.model_name} ({info.dtype} on {info.device}, up to {info.max_model_len:,} tokens per request)
  cache   {info.num_device_blocks:,} blocks of {info.block_tokens} tokens ({num_tokens:,} in all), empty; {caching}{tiers}
  engine  process {serving.engine_pid}, {info.limits}
  http    {serving.num_workers} {"worker" if serving.num_workers == 1 else "workers"}
{heading}
  {curl} {serving.url}/v1/chat/completions -d '{body}'
  {curl} {serving.url}/cache
  {top}
  {serving.url}/dashboard in a browser
stop with Ctrl-C"""


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
