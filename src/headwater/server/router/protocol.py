"""The registration that an instance sends with each heartbeat: JSON, bounded, versioned."""

from hashlib import sha256
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

VERSION = 1
"""Version of the registration; a router refuses other versions."""

TOKEN_HEADER = "x-headwater-peer-token"
PREFILL_HEADER = "x-headwater-prefill"
FALLBACK_HEADER = "x-headwater-fallback"
CALLER_HEADER = "x-headwater-caller"
"""The client behind a forwarded request, as the router authenticated it."""

DIGEST_HEADER = "x-headwater-digest"
"""SHA-256 of a signed body, in hex."""

SIGNED_HEADERS = (PREFILL_HEADER, FALLBACK_HEADER, CALLER_HEADER, DIGEST_HEADER)
"""Headers that the signature of a request covers."""

MAX_BYTES = 16 * 1024
"""Longest registration body."""

Role = Literal["mixed", "prefill", "decode"]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=512)]
Fingerprint = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
"""Identity of a model: SHA-256 in hex. A shorter value could match several models."""
Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Amount = Annotated[float, Meta(ge=0, le=1e18)]
Endpoint = Annotated[str, Meta(pattern=r"^tcp://[^\s]{1,256}$", max_length=262)]


class InstanceLoad(Struct, kw_only=True, frozen=True):
    """Load of an instance."""

    running: Count = 0
    waiting: Count = 0
    leases: Count = 0
    """Hand-offs in flight in either direction; each holds a lease."""


class InstanceReport(Struct, kw_only=True, frozen=True):
    """Activity of an instance for the router's page: rates and latencies of the last minute,
    and hand-offs since its engine started."""

    output_tokens_s: Amount = 0.0
    prompt_tokens_s: Amount = 0.0
    hit_share: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of prompt tokens that were found in a cache; None without a prompt."""

    ttft_p50_s: Amount | None = None
    ttft_p99_s: Amount | None = None
    itl_p50_s: Amount | None = None
    itl_p99_s: Amount | None = None
    sent_handoffs: Count = 0
    """Successful hand-offs on the prefill side; `received_handoffs` on the decode side."""

    sent_bytes: Count = 0
    received_handoffs: Count = 0
    received_bytes: Count = 0
    failed_handoffs: Count = 0
    """Failed hand-offs, on either side."""


class EventsAddress(Struct, kw_only=True, frozen=True):
    """Addresses of an instance's KV events."""

    endpoint: Endpoint
    replay_endpoint: Endpoint
    topic: Text = ""
    curve: bool = False
    """Whether the sockets need the keys made from the peer token (ZMQ CURVE)."""


class ModelGroup(NamedTuple):
    """Instances whose KV and answers are interchangeable: same weights, same KV bytes, same
    program. During a rolling upgrade a router has two."""

    fingerprint: str
    kv_format: str
    block_tokens: int
    software: str

    @property
    def label(self) -> str:
        """A short name for logs, metrics and `/instances`; it does not reveal the fingerprint."""
        return sha256(repr(tuple(self)).encode()).hexdigest()[:12]


class Registration(Struct, kw_only=True, frozen=True):
    """Body of `POST /instances`: the first one registers, later ones are heartbeats."""

    version: int
    instance_id: Name
    epoch: Name
    """Changes with every restart; then the router forgets what it knew about the cache."""

    role: Role
    url: Annotated[str, Meta(pattern=r"^https?://[^\s/]{1,256}$")]
    peer_address: Text = ""
    model: Name
    fingerprint: Fingerprint
    kv_format: Text = ""
    block_tokens: Annotated[int, Meta(ge=1, le=1 << 20)]
    capacity_tokens: Count = 0
    max_model_len: Count = 0
    kv_events: EventsAddress | None = None
    load: InstanceLoad = InstanceLoad()
    report: InstanceReport = InstanceReport()
    software: Text = ""
    """Headwater version of the instance."""

    is_draining: bool = False
    """The instance finishes its requests and takes no new ones."""

    @property
    def group(self) -> ModelGroup:
        return ModelGroup(self.fingerprint, self.kv_format, self.block_tokens, self.software)


class Registered(Struct, kw_only=True, frozen=True):
    """The response: the interval of heartbeats."""

    heartbeat_s: float
