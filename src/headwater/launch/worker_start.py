"""What the supervisor tells an HTTP worker: its settings, and the state of the engine."""

from msgspec import Struct

from headwater.config import EngineConfig
from headwater.engine.client import EngineInfo
from headwater.engine.record_file import RecordTarget
from headwater.server.answers import RouterHealth
from headwater.server.config import ServerConfig


class WorkerStart(Struct, frozen=True, kw_only=True):
    """The settings of a new worker."""

    name: str
    listener: int
    """Descriptor of the listening socket."""

    index: int
    """Its place among the workers, from 0."""

    connections: int
    """Descriptor of the counts of connections that all workers share."""

    engine: EngineConfig
    server: ServerConfig
    is_leader: bool
    """Whether it registers the server at the router and samples the server's history."""

    is_replacement: bool = False


class EngineUp(Struct, frozen=True, kw_only=True):
    """An engine accepts requests."""

    address: str
    info: EngineInfo
    created_s: float
    """Unix time when serving began."""

    started_s: float
    """`created_s` by the monotonic clock, which all processes share."""

    num_restarts: int
    num_violations: int
    record: RecordTarget | None = None
    router_health: list[RouterHealth] = []


class EngineDown(Struct, frozen=True, kw_only=True):
    """The engine has ended."""

    reason: str
    retry_after_s: float | None
    """Seconds after which clients should try again; None if no new engine will be started."""

    num_violations: int
