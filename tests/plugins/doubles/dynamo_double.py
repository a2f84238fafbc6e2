"""The part of Dynamo 1.6's backend interface that the worker uses, without Dynamo."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


@dataclass
class LlmRegistration:
    context_length: int | None = None
    kv_cache_block_size: int | None = None
    total_kv_blocks: int | None = None
    max_num_seqs: int | None = None


@dataclass
class EngineConfig:
    model: str
    served_model_name: str | None = None
    llm: LlmRegistration | None = None


@dataclass
class WorkerConfig:
    namespace: str
    component: str = "backend"
    endpoint: str = "generate"
    model_name: str = ""
    served_model_name: str | None = None
    endpoint_types: str = "chat,completions"
    discovery_backend: str = "etcd"
    request_plane: str = "tcp"
    event_plane: str | None = None
    enable_kv_routing: bool = True
    labels: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class ZmqSource:
    endpoint: str
    topic: str = ""
    dp_rank: int = 0


@dataclass
class ComponentSnapshot:
    kv_used_blocks: int
    kv_total_blocks: int
    gpu_cache_usage: float
    dp_rank: int
    kv_cache_hit_rate: float | None = None


class InvalidArgument(Exception): ...


class EngineShutdown(Exception): ...


class LLMEngine(ABC):
    @classmethod
    @abstractmethod
    async def from_args(cls, argv=None): ...

    @abstractmethod
    async def start(self, worker_id): ...

    @abstractmethod
    async def cleanup(self): ...

    @abstractmethod
    async def generate(self, request, context): ...
