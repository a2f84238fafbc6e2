"""The part of vLLM 0.32's interfaces that the plug-ins use, without vLLM.

Every name stands for the class of the same name in vLLM. `scripts/test-plugins` runs the same tests
with the real package, so a double that differs from it is found.
"""

import enum
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NewType

OffloadKey = NewType("OffloadKey", bytes)
DEFAULT_NONE_HASH_SEED = "vllm-none-hash"


def make_offload_key(block_hash, group_idx):
    return OffloadKey(block_hash + group_idx.to_bytes(4, "big"))


def resolve_kv_cache_block_sizes(kv_cache_config, vllm_config):
    size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    return size, size


class Medium(enum.Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"


class LookupResult(enum.Enum):
    MISS = enum.auto()
    HIT = enum.auto()
    HIT_PENDING = enum.auto()
    RETRY = enum.auto()


class CacheHitSource(enum.StrEnum):
    HOST = "host"
    DISK = "disk"


@dataclass
class ReqContext:
    req_id: str
    kv_transfer_params: dict[str, Any] | None = None
    _state: dict[type, Any] = field(default_factory=dict, init=False)
    _offload_key_positions: dict[OffloadKey, int] = field(default_factory=dict, init=False)

    def set_state(self, val):
        self._state[type(val)] = val

    def get_state(self, cls):
        return self._state.get(cls)

    def set_offload_key_position(self, key, end_token):
        self._offload_key_positions[key] = end_token

    def get_offload_key_position(self, key):
        return self._offload_key_positions.get(key)


@dataclass
class RequestOffloadingContext:
    pass


class ScheduleEndContext(NamedTuple):
    new_req_ids: Any
    preempted_req_ids: Any


@dataclass(frozen=True)
class OffloadingMetricMetadata:
    documentation: str
    labelnames: tuple[str, ...] = ()


class OffloadingCounterMetadata(OffloadingMetricMetadata):
    pass


class OffloadingGaugeMetadata(OffloadingMetricMetadata):
    pass


class OffloadingConnectorStats:
    def __init__(self):
        self.data = {}

    def set_gauge(self, name, value, labelvalues=()):
        self.data[name, labelvalues] = value

    def increase_counter(self, name, value=1, labelvalues=()):
        self.data[name, labelvalues] = self.data.get((name, labelvalues), 0) + value


@dataclass
class TransferJob:
    job_id: int
    keys: Any
    chunk_ids: Any
    is_promotion: bool
    req_context: ReqContext
    submit_time: float = field(default_factory=time.monotonic)


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None
    transfer_bytes: int | None = None


class SecondaryTierManager(ABC):
    def __init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector=None):
        self._primary_kv_view = primary_kv_view
        self.tier_type = tier_type

    @abstractmethod
    def lookup(self, key, req_context): ...

    @abstractmethod
    def submit_store(self, job_metadata): ...

    @abstractmethod
    def submit_load(self, job_metadata): ...

    @abstractmethod
    def get_finished_jobs(self): ...

    @abstractmethod
    def on_new_request(self, req_context): ...

    @abstractmethod
    def drain_jobs(self): ...


class ChunkStatus:
    def __init__(self, chunk_id):
        self.ref_cnt = -1
        self.chunk_id = chunk_id


class CachePolicy(ABC):
    def __init__(self, cache_capacity):
        self.cache_capacity = cache_capacity

    @abstractmethod
    def get(self, key): ...

    @abstractmethod
    def insert(self, key, chunk): ...

    @abstractmethod
    def remove(self, key): ...

    @abstractmethod
    def touch(self, keys, req_context): ...

    @abstractmethod
    def evict(self, n, protected): ...

    @abstractmethod
    def clear(self): ...


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024 - as in vLLM
    pass


class KVConnectorWorkerMetadata(ABC):
    @abstractmethod
    def aggregate(self, other): ...


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...


class KVConnectorBase_V1(ABC):  # noqa: B024 - its methods are not called
    def __init__(self, vllm_config, role, kv_cache_config):
        self._connector_metadata = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._kv_cache_manager: Any = None
        self._role = role

    def bind_connector_metadata(self, metadata):
        self._connector_metadata = metadata

    def bind_kv_cache_manager(self, manager):
        self._kv_cache_manager = manager


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


class KVConnectorPromMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        self.per_engine_labelvalues = per_engine_labelvalues
