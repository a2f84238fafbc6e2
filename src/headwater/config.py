"""The settings of an operator: one frozen class per layer, validated on construction.

Every default of the command line is here. Units are in the names. An invalid value raises
`ConfigError` with a sentence that tells the operator what to change.
"""

import ipaddress
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from headwater.errors import ConfigError
from headwater.types import LoadPolicy

VERSION = "0.1.0"
"""The version of this program; the same as `headwater.__version__`."""

MIB = 1 << 20

CPU_NUM_SEQS, CPU_STEP_TOKENS = 64, 2048
"""Default sequences and tokens per step on a CPU."""

LOG_FORMATS = ("text", "json")
EVICTIONS = ("lru", "s3fifo", "arc", "session")
WRITE_POLICIES = ("auto", "write_through", "write_through_selective", "write_back", "none")
LOAD_POLICIES = get_args(LoadPolicy)
ROLES, LINKS = ("mixed", "prefill", "decode"), ("auto", "shm", "tcp", "cuda", "mooncake")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """How an instance publishes what it has cached. The names are those of the JSON."""

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    """`null` publishes nothing, as if events were not enabled."""

    endpoint: str = "tcp://127.0.0.1:*"
    """Address of the PUB socket; `*` means any free port."""

    replay_endpoint: str = "tcp://127.0.0.1:*"
    """Address at which subscribers request events that they missed."""

    advertised_endpoint: str | None = None
    advertised_replay_endpoint: str | None = None
    """The addresses that the router is told, if they differ from the bound ones."""

    buffer_steps: int = 10_000
    """Batches kept for replay; older ones are replaced by a snapshot."""

    hwm: int = 100_000
    """Batches queued for a slow subscriber; further batches are dropped for it."""

    topic: str = ""

    token_ids: bool = False
    """Publish the token ids of blocks for consumers that need them. Token ids disclose
    prompts."""

    insecure: bool = False
    """Publish without authentication, even beyond loopback or with token ids."""

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
        """Whether publishing without a peer token would disclose prompts or reach other
        hosts."""
        local = all(_is_local(name) for name in (self.endpoint, self.replay_endpoint))
        return (self.token_ids or not local) and not self.insecure


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersConfig:
    """How an instance takes part in hand-offs. The shared token is in the environment."""

    role: Literal["mixed", "prefill", "decode"] = "mixed"
    """Whether the instance prefills for others, decodes, or does both."""

    link: Literal["auto", "shm", "tcp", "cuda", "mooncake"] = "auto"
    """The link over which blocks come to this instance. `auto`: memory that is mapped from peers
    on the same machine (`shm`, on GPUs `cuda`), and `tcp` from other machines."""

    host: str = "127.0.0.1"
    port: int = 0
    """Address to listen on for control messages of peers; port 0 takes a free one."""

    advertise_host: str | None = None
    advertise_port: int | None = None
    """Address for control messages that is told to peers, if it differs."""

    link_host: str | None = None
    link_port: int = 0
    """Address to listen on for blocks; without a `link_host`, `host` is used. Port 0 takes a free
    one."""

    link_advertise_host: str | None = None
    link_advertise_port: int | None = None
    """Address for blocks that is told to peers, if it differs."""

    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    """PEM files for mutual TLS with peers, on control connections and the `tcp` link."""

    max_inflight: int = 64
    """Maximum number of prompts that are computed for other instances at once."""

    lease_s: float = 10.0
    """Seconds without a heartbeat after which a lease of a peer expires."""

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
    """Settings of the engine process: the model, its memory, the limits of a step."""

    model: str | None = None
    """Hugging Face model directory; None means the built-in tiny model."""

    model_name: str | None = None
    """Name of the model for clients; None means the last part of its path."""

    dtype: str = "auto"
    """Type of weights and KV; `auto` means that of the model's config."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of stored KV, on every tier and link; `auto` means that of `dtype`."""

    device: str = "cpu"
    """Where the model runs: `cpu`, `cuda`, `cuda:1`; with several ranks also one for each,
    `cuda:0,cuda:2`."""

    tensor_parallel_size: int = 1
    """Ranks over which the model is split: one process and one device each."""

    block_tokens: int = 64
    """Tokens in a block, the unit of matching, eviction and transfer."""

    max_model_len: int | None = None
    """Maximum number of tokens of prompt and output together; None means the length the model
    was trained for."""

    max_num_seqs: int | None = None
    """Maximum number of sequences computed in one step; None chooses from device and model."""

    max_batched_tokens: int | None = None
    """Maximum number of tokens computed in one step; longer prompts are computed in chunks.
    None chooses a value."""

    max_itl_ms: float | None = None
    """Target in milliseconds for the time between tokens while prompts are computed. None means
    four decode steps, at least 30 ms, on a GPU, and no target on a CPU; 0 means no target."""

    memory_utilization: float | None = None
    """Share of the free device memory for KV blocks, after the model is loaded. None means 0.9
    on a GPU, 0.95 if 64 GiB or more are free, and half of main memory on a CPU."""

    num_blocks_override: int | None = None
    """Exact number of device blocks, instead of the number that fits."""

    num_threads: int | None = None
    """Compute threads of each rank on a CPU; None leaves one core to the server. More threads
    than free cores make it many times slower."""

    prefix_caching: bool = True
    """Whether a prompt may reuse blocks that an earlier request computed."""

    output_caching: bool = True
    """Whether generated tokens are committed too, for the next turn of a conversation."""

    eviction: Literal["lru", "s3fifo", "arc", "session"] = "lru"
    """Eviction policy of the device and the host tier."""

    eviction_weights: str = "shipped"
    """Initial weights of the `session` policy: `none`, `shipped`, or a file."""

    hint_budget: float = 0.5
    """Share of the device blocks that the hints of one tenant may keep."""

    prefetch_sessions: bool = True
    """Whether a session is loaded one tier up shortly before the return time that its client
    announced."""

    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of the waiting queue: by arrival, or first by the request's `priority`."""

    swap_space_gib: float | None = None
    """Main memory of the host tier; 0 means no host tier. None chooses the size at start, on a
    GPU or above storage (`launch.tiers.default_host_bytes`)."""

    write_policy: Literal[
        "auto", "write_through", "write_through_selective", "write_back", "none"
    ] = "auto"
    """When a device block is written to the host: when computed, when found again, before it is
    evicted, or never."""

    save_preempted: bool = True
    """Whether the blocks of a preempted sequence are written to the host, whatever the write
    policy is."""

    load_policy: LoadPolicy = "priced"
    """Default for requests: what to do about blocks in lower tiers."""

    load_timeout_s: float = 5.0
    """Longest wait of a request for lower tiers."""

    step_timeout_s: float = 600.0
    """Maximum duration of one step of the device. A longer step ends the engine, which is then
    restarted."""

    storage_backend: str | None = None
    """Storage below the host tier: `file`, `redis`, `mooncake`, or `module:Class`."""

    storage_config: dict[str, Any] = field(default_factory=dict)
    """Settings of the backend."""

    storage_is_optional: bool = False
    """Whether the engine starts even if storage cannot be opened. True after a restart, because
    these settings have worked before."""

    kv_events: KvEventsConfig | None = None
    """How KV events are published; None means not at all."""

    peers: PeersConfig | None = None
    """Settings of hand-offs; None means no hand-offs."""

    def __post_init__(self) -> None:
        _positive("--block-size", self.block_tokens)
        _positive("--max-num-seqs", self.max_num_seqs)
        _positive("--max-num-batched-tokens", self.max_batched_tokens)
        _positive("--max-model-len", self.max_model_len)
        _positive("--num-gpu-blocks-override", self.num_blocks_override)
        _positive("--threads", self.num_threads)
        if not 0.0 < self.step_timeout_s < float("inf"):
            raise ConfigError(
                f"--step-timeout must be a positive number of seconds, got {self.step_timeout_s}"
            )
        if self.max_itl_ms is not None and not 0.0 <= self.max_itl_ms < float("inf"):
            raise ConfigError(f"--max-itl-ms cannot be negative, got {self.max_itl_ms:g}")
        _positive("--tensor-parallel-size", self.tensor_parallel_size)
        if self.memory_utilization is not None and not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be above 0 and at most 1, got {self.memory_utilization}"
            )
        if not 0.0 <= self.hint_budget <= 1.0:
            raise ConfigError(f"--hint-budget must be between 0 and 1, got {self.hint_budget}")
        _one_of("--scheduling-policy", self.scheduling_policy, ("fcfs", "priority"))
        self._check_tiers()

    @property
    def may_have_host_tier(self) -> bool:
        """Whether a host tier is created if enough main memory is free."""
        if self.swap_space_gib is not None:
            return self.swap_space_gib > 0
        # The KV pool of a CPU is already main memory. A host tier of the same memory is useful
        # only above storage, which reads and writes host slots.
        chosen = self.device != "cpu" or self.storage_backend is not None
        filled = self.write_policy != "none" or self.save_preempted
        return chosen and self.prefix_caching and filled

    def _check_tiers(self) -> None:
        if not 0.0 <= (self.swap_space_gib or 0.0) < float("inf"):
            raise ConfigError(
                f"--swap-space must be a size in GiB that is not negative, got {self.swap_space_gib}"
            )
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
            raise ConfigError("--kvcache-storage-config needs --kvcache-storage-backend")


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
    """The key of HEADWATER_API_KEY. Other users of the machine can see flags, but not this
    variable."""
    return os.environ.get("HEADWATER_API_KEY") or None


def peer_token_from_environment() -> str | None:
    """The token of HEADWATER_PEER_TOKEN."""
    return os.environ.get("HEADWATER_PEER_TOKEN") or None


def check_secret(flag: str, value: str | None) -> None:
    """Raise ConfigError for a secret that cannot be sent in a header."""
    if value == "":
        raise ConfigError(f"{flag} is empty; leave it out to use none")
    if value is not None and not _is_header_value(value):
        raise ConfigError(
            f"{flag} must be printable ASCII without spaces, because it is sent in a header"
        )


def _positive(flag: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{flag} must be at least 1, got {value}")


def _port(flag: str, value: int | None) -> None:
    if value is not None and not 0 <= value <= 65535:
        raise ConfigError(f"{flag} must be from 0 to 65535, got {value}")


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} must be one of {', '.join(known)}; got {value!r}")


def _is_header_value(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
