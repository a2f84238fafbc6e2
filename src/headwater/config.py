"""What an operator may set, one frozen class a layer, checked once when it is built.

Every default of the command line is here. Units are in the names; a value that cannot work
raises `ConfigError` with a sentence an operator can act on.
"""

import ipaddress
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from headwater.errors import ConfigError
from headwater.types import LoadPolicy

VERSION = "0.1.0"
"""Of this program; `headwater.__version__` is the same."""

MIB = 1 << 20

CPU_NUM_SEQS, CPU_STEP_TOKENS = 64, 2048
"""Sequences and tokens of a step on a CPU, unless the operator says otherwise."""

LOG_FORMATS = ("text", "json")
EVICTIONS = ("lru", "s3fifo", "arc", "session")
WRITE_POLICIES = ("auto", "write_through", "write_through_selective", "write_back", "none")
LOAD_POLICIES = get_args(LoadPolicy)
ROLES, LINKS = ("mixed", "prefill", "decode"), ("shm", "tcp", "mooncake")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """How an instance tells others what it has cached; the names are those of its JSON."""

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    """`null` publishes nothing, as if events were not enabled."""

    endpoint: str = "tcp://127.0.0.1:*"
    """Where the PUB socket is bound; `*` is any free port."""

    replay_endpoint: str = "tcp://127.0.0.1:*"
    """Where what was missed can be asked for."""

    advertised_endpoint: str | None = None
    advertised_replay_endpoint: str | None = None
    """Addresses of both that the router is given, where they differ from the bound ones."""

    buffer_steps: int = 10_000
    """Batches kept for replay; for older ones there is a snapshot."""

    hwm: int = 100_000
    """Batches kept for a listener that is slow; it misses those beyond."""

    topic: str = ""

    token_ids: bool = False
    """Publish the token ids of blocks, which are prompts, for consumers that need them."""

    insecure: bool = False
    """Publish without authentication, also beyond loopback or with token ids."""

    def __post_init__(self) -> None:
        _positive("--kv-events-config buffer_steps", self.buffer_steps)
        _positive("--kv-events-config hwm", self.hwm)
        _one_of("--kv-events-config publisher", self.publisher, ("zmq", "null"))

    @property
    def is_on(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def needs_secret(self) -> bool:
        """Whether publishing without a peer token would show prompts or reach other hosts."""
        local = all(_is_local(name) for name in (self.endpoint, self.replay_endpoint))
        return (self.token_ids or not local) and not self.insecure


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersConfig:
    """How an instance takes part in hand-offs; the shared token is in the environment."""

    role: Literal["mixed", "prefill", "decode"] = "mixed"
    """Computes prompts for others, decodes what others computed, or both and all by itself."""

    link: Literal["shm", "tcp", "mooncake"] = "tcp"
    """How blocks come to this instance."""

    host: str = "127.0.0.1"
    port: int = 0
    """Address to listen on for control messages of peers; port 0 takes a free one."""

    advertise_host: str | None = None
    advertise_port: int | None = None
    """Address for control messages that peers are given, where it is another one."""

    link_host: str | None = None
    link_port: int = 0
    """Address to listen on for blocks; without a host it is that of control messages."""

    link_advertise_host: str | None = None
    link_advertise_port: int | None = None
    """Address for blocks that peers are given, where it is another one."""

    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    """PEM files for mutual TLS with peers, on control connections and the `tcp` link."""

    max_inflight: int = 64
    lease_s: float = 10.0
    """Most prompts computed for others at once; how long a lease lives without a heartbeat."""

    def __post_init__(self) -> None:
        _one_of("--splitwise-role", self.role, ROLES)
        _one_of("--cache-transfer-protocol", self.link, LINKS)
        _positive("--max-inflight-prefill", self.max_inflight)
        _port("--peer-port", self.port)
        _port("--peer-advertise-port", self.advertise_port)
        _port("--link-port", self.link_port)
        _port("--link-advertise-port", self.link_advertise_port)
        if self.lease_s <= 0:
            raise ConfigError(f"--peer-lease must be positive, got {self.lease_s:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the engine process needs to know: the model, its memory, its limits a step."""

    model: str | None = None
    """Hugging Face model directory; None is the built-in tiny model."""

    model_name: str | None = None
    """Name of the model for clients; None is the last part of its path."""

    dtype: str = "auto"
    """Type of weights and KV; `auto` is what the model's config says."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type that KV is stored in, on every tier and link; `auto` is that of `dtype`."""

    device: str = "cpu"
    """Where the model runs: `cpu`, `cuda`, `cuda:1`; with several ranks also one for each,
    `cuda:0,cuda:2`."""

    tensor_parallel_size: int = 1
    """Ranks that the model is split over: a process and a device each."""

    block_tokens: int = 64
    """Tokens in a block; the unit of matching, eviction and transfer."""

    max_model_len: int | None = None
    """Most tokens of prompt and output together; None is what the model was trained for."""

    max_num_seqs: int | None = None
    """Most sequences computed in one step; None is chosen from device and model."""

    max_batched_tokens: int | None = None
    """Most tokens computed in one step; longer prompts are computed in chunks. None is chosen."""

    max_itl_ms: float | None = None
    """Target in milliseconds for the time between tokens while prompts are computed; None is
    3.5 decode steps, at least 30 ms, on a GPU, and none on a CPU; 0 is none."""

    memory_utilization: float | None = None
    """Share of the device's free memory, once the model is loaded, that KV blocks may use; None
    is 0.9 of a GPU's, 0.95 where 64 GiB and more are free, and half of main memory."""

    num_blocks_override: int | None = None
    """Exact number of device blocks, instead of measuring what fits."""

    num_threads: int | None = None
    """Threads that each rank computes with on a CPU; None leaves one core to the server. More
    threads than free cores make it many times slower."""

    prefix_caching: bool = True
    """Whether a prompt may reuse blocks that an earlier request computed."""

    output_caching: bool = True
    """Whether generated tokens are committed too, for the next turn of a conversation."""

    eviction: Literal["lru", "s3fifo", "arc", "session"] = "lru"
    """Which cached blocks go first when room is needed, on the device and on the host."""

    eviction_weights: str = "shipped"
    """What the `session` policy begins with: `none`, `shipped`, or a file of weights."""

    hint_budget: float = 0.5
    """Share of the device's blocks that one tenant's hints may ask to be kept."""

    prefetch_sessions: bool = True
    """Whether a session that said when it returns is brought up a tier shortly before."""

    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of the waiting line: by arrival, or by the request's `priority` first."""

    swap_space_gib: float | None = None
    """Main memory of the host tier, to which device blocks are written; 0 is no host tier. None
    chooses the size at start, on a GPU or above storage (`launch.tiers.default_host_bytes`)."""

    write_policy: Literal[
        "auto", "write_through", "write_through_selective", "write_back", "none"
    ] = "auto"
    """When a device block is written to the host: when computed, when found again, when about
    to be evicted, or never."""

    save_preempted: bool = True
    """Whether a preempted sequence's blocks are written to the host, whatever the policy."""

    load_policy: LoadPolicy = "priced"
    """What is done about blocks in lower tiers, unless a request says otherwise."""

    load_timeout_s: float = 5.0
    """Longest wait of a request for lower tiers."""

    storage_backend: str | None = None
    """Storage below the host tier: `file`, `redis`, `mooncake`, or `module:Class`."""

    storage_config: dict[str, Any] = field(default_factory=dict)
    """Settings of the backend."""

    kv_events: KvEventsConfig | None = None
    """How others are told what is cached; None is not at all."""

    peers: PeersConfig | None = None
    """Hand-offs with other instances; None is to serve alone."""

    def __post_init__(self) -> None:
        _positive("--block-size", self.block_tokens)
        _positive("--max-num-seqs", self.max_num_seqs)
        _positive("--max-num-batched-tokens", self.max_batched_tokens)
        _positive("--max-model-len", self.max_model_len)
        _positive("--num-gpu-blocks-override", self.num_blocks_override)
        _positive("--threads", self.num_threads)
        if self.max_itl_ms is not None and not 0.0 <= self.max_itl_ms < float("inf"):
            raise ConfigError(f"--max-itl-ms cannot be negative, got {self.max_itl_ms:g}")
        _positive("--tensor-parallel-size", self.tensor_parallel_size)
        if self.memory_utilization is not None and not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization is a share between 0 and 1, got {self.memory_utilization}"
            )
        if not 0.0 <= self.hint_budget <= 1.0:
            raise ConfigError(
                f"--hint-budget is a share between 0 and 1, got {self.hint_budget}"
            )
        _one_of("--scheduling-policy", self.scheduling_policy, ("fcfs", "priority"))
        self._check_tiers()

    @property
    def may_have_host_tier(self) -> bool:
        """Whether a host tier is made, provided that main memory is free for it."""
        if self.swap_space_gib is not None:
            return self.swap_space_gib > 0
        # The KV pool of a CPU is main memory already: a host tier of the same memory only
        # makes sense above storage, which reads and writes host slots.
        chosen = self.device != "cpu" or self.storage_backend is not None
        filled = self.write_policy != "none" or self.save_preempted
        return chosen and self.prefix_caching and filled

    def _check_tiers(self) -> None:
        if not 0.0 <= (self.swap_space_gib or 0.0) < float("inf"):
            raise ConfigError(f"--swap-space is a size in GiB, got {self.swap_space_gib}")
        if self.load_timeout_s < 0:
            raise ConfigError(f"--load-timeout cannot be negative, got {self.load_timeout_s}")
        _one_of("--eviction", self.eviction, EVICTIONS)
        _one_of("--write-policy", self.write_policy, WRITE_POLICIES)
        _one_of("--load-policy", self.load_policy, LOAD_POLICIES)
        if self.storage_backend is not None and self.swap_space_gib == 0:
            raise ConfigError(
                "--kvcache-storage-backend needs a host tier to pass through: leave out "
                "--swap-space 0"
            )
        if self.storage_config and self.storage_backend is None:
            raise ConfigError(
                "--kvcache-storage-config has nothing to set: give --kvcache-storage-backend"
            )


def _is_local(endpoint: str) -> bool:
    """Whether only this machine can connect to a ZMQ endpoint."""
    scheme, _, address = endpoint.partition("://")
    return scheme in ("ipc", "inproc") or is_loopback(address.rpartition(":")[0].strip("[]"))


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this machine can connect to."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def api_key_from_environment() -> str | None:
    """The key of HEADWATER_API_KEY: unlike a flag, other users of the machine cannot see it."""
    return os.environ.get("HEADWATER_API_KEY") or None


def peer_token_from_environment() -> str | None:
    """The token of HEADWATER_PEER_TOKEN."""
    return os.environ.get("HEADWATER_PEER_TOKEN") or None


def check_secret(flag: str, value: str | None) -> None:
    """Raise ConfigError for a secret that no header can carry."""
    if value == "":
        raise ConfigError(f"{flag} is empty; leave it out to ask for none")
    if value is not None and not _is_header_value(value):
        raise ConfigError(f"{flag} must be printable ASCII without spaces")


def _positive(flag: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{flag} must be at least 1, got {value}")


def _port(flag: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= 65535:
        raise ConfigError(f"{flag} must be from 0 to 65535, got {value}")


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} is one of {', '.join(known)}; got {value!r}")


def _is_header_value(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
