"""Every exception that Headwater raises, in one tree by whose fault it is.

* HeadwaterError
  + ConfigError       the operator's mistake; raised before serving starts
  + CacheUseError     the cache's caller broke its contract; nothing was changed
    - StaleLease      a lease that was released already, or belongs to another cache
  + RequestError      the client's mistake; becomes a 4xx
    - PromptTooLong
    - QueueFull       the server's queue limit; becomes a 429
    - NotDrained      requests did not end in time for a control call; becomes a 503
  + ModelError        a model directory that cannot be served
  + StorageError      a storage backend failed; becomes a cache miss, never a 5xx
    - StorageTimeout  a call missed its deadline; `quiet` is set when it uses no buffer any more
    - StorageCorrupt  stored bytes are not the requested block; `reason` says how
    - StorageBadAnswer    a backend answered something that its interface does not allow
    - StorageUnavailable  a backend failed repeatedly, and is not called for a while
  + DeviceError       a call to the GPU's driver failed; a copy becomes a miss
  + PeerRefused       another instance refuses a request; a third one may accept it
  + EngineDead        the engine process has ended; what ran on it is lost
    - EngineRestarting  a new engine is being started; becomes a 503 with Retry-After

A broken invariant is not in this tree: it is an `InvariantError`, an AssertionError,
because it is our mistake. It is raised by explicit checks, so `python -O` keeps it.
"""

from threading import Event


class HeadwaterError(Exception):
    """Anything Headwater raises on purpose."""


class ConfigError(HeadwaterError):
    """A setting is unknown, invalid, or contradicts another."""


class CacheUseError(HeadwaterError, ValueError):
    """An argument that the cache cannot accept; the cache is unchanged."""


class StaleLease(CacheUseError):
    """A lease that is not held here: it was released already, or belongs to another cache."""


class RequestError(HeadwaterError, ValueError):
    """A request that cannot be served as it is."""


class PromptTooLong(RequestError):
    """Prompt and output together exceed what one request may use."""


class QueueFull(RequestError):
    """The waiting queue is full; retry later."""


class NotDrained(RequestError):
    """A control call needs an idle engine, but requests or transfers did not end in time."""


class ModelError(HeadwaterError):
    """A model directory that is missing, damaged, or of an unsupported kind."""


class StorageError(HeadwaterError):
    """A storage backend failed; for a request this is a miss."""


class StorageTimeout(StorageError):
    """A storage call missed its deadline. Its caller has stopped waiting; the call may still run."""

    def __init__(self, message: str, *, quiet: Event | None = None) -> None:
        super().__init__(message)
        self.quiet = quiet
        """Set when the call does not touch its buffers any more; None if that is already the
        case."""


class StorageCorrupt(StorageError):
    """The stored bytes are not the requested block."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason
        """One word for counting, such as `bad_checksum`."""


class StorageBadAnswer(StorageError):
    """A backend answered something that its interface does not allow."""


class StorageUnavailable(StorageError):
    """Storage failed several times in a row and is not called for a while."""


class DeviceError(HeadwaterError):
    """The driver refused a call; the operation did not happen."""


class PeerRefused(HeadwaterError):
    """The instance that should compute a prompt refused; no answer was sent yet."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the prefill instance does not take this request: {reason}")
        self.reason = reason
        """One word, such as `busy`."""


class EngineDead(HeadwaterError):
    """The engine process or loop has ended; nothing more will be answered."""


class EngineRestarting(EngineDead):
    """The engine has ended and the next one is being started; retry."""

    def __init__(self, reason: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(f"restarting: {reason}; a new engine is being started, retry later")
        self.retry_after_s = retry_after_s


class PackageMissing(HeadwaterError, ImportError):
    """A package that belongs to an extra is not installed."""

    def __init__(self, error: ImportError, *, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {error.name!r}, which is not installed; "
            f"try: pip install 'headwater[{extra}]'"
        )


class InvariantError(AssertionError):
    """An invariant of Headwater is violated: a bug, detected before it caused damage."""
