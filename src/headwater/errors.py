"""Everything Headwater raises, in one tree that says whose fault it is.

* HeadwaterError
  + ConfigError       the operator's mistake; raised before serving starts
  + CacheUseError     the cache's caller broke its contract; nothing was changed
    - StaleLease      a lease that was released already, or belongs to another cache
  + RequestError      the client's mistake; becomes a 4xx
    - PromptTooLong
    - QueueFull       the server's queue limit; becomes a 429
  + ModelError        a model directory that cannot be served; says why
  + EngineDead        unrecoverable; the process exits

A broken invariant is not in this tree: it is an `InvariantError`, an AssertionError,
because it is our mistake. It is raised by explicit checks, so `python -O` keeps it.
"""


class HeadwaterError(Exception):
    """Anything Headwater raises on purpose."""


class ConfigError(HeadwaterError):
    """A setting is unknown, impossible, or contradicts another."""


class CacheUseError(HeadwaterError, ValueError):
    """An argument the cache cannot accept; the cache is unchanged."""


class StaleLease(CacheUseError):
    """A lease that is not held here: released already, or another cache's."""


class RequestError(HeadwaterError, ValueError):
    """A request that cannot be served as asked."""


class PromptTooLong(RequestError):
    """Prompt and output together exceed what one request may use."""


class QueueFull(RequestError):
    """As many requests wait as may wait; try again later."""


class ModelError(HeadwaterError):
    """A model directory that is missing, damaged, or of a kind not served."""


class EngineDead(HeadwaterError):
    """The engine process or loop has ended; nothing more will be answered."""


class InvariantError(AssertionError):
    """The books do not balance: a bug in Headwater, found before it did harm."""
