"""The result of each request of a replay, as its client would see it."""

from array import array
from dataclasses import dataclass, field

from headwater.disagg.routing import RecentWork
from headwater.scheduler.request import Usage


@dataclass(slots=True, eq=False)
class Work:
    """Prompt tokens assigned to an instance, as a router counts them."""

    recent: RecentWork = field(default_factory=RecentWork)
    outstanding_tokens: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class SimRequest:
    """One request during the replay and at its end. Times are seconds of the virtual clock."""

    arrival_s: float
    prompt_tokens: int
    reusable_tokens: int = 0
    """Leading prompt tokens that an earlier request of the trace contained."""

    prefill: str = ""
    """The other instance that computes its prompt; empty if there is none."""

    uncached_tokens: int = 0
    """Prompt tokens that the instance which computes its prompt is expected to compute."""

    work: Work | None = None
    """The outstanding work of the instance that computes the prompt. This request is part of it
    until its first token."""

    first_s: float | None = None
    """Time of its first token."""

    last_s: float = 0.0
    """Time of its last token so far."""

    num_output: int = 0
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))
    """Times between its tokens."""

    usage: Usage | None = None
    finished: bool = False
    refused: str | None = None
    """Why the engine refused it; None if it can be served."""

    @property
    def ttft_s(self) -> float:
        """Time from arrival to first token; infinite without one."""
        return float("inf") if self.first_s is None else self.first_s - self.arrival_s

    def note(self, num_tokens: int, now: float) -> None:
        """Record tokens that arrived."""
        if not num_tokens:
            return
        if self.first_s is None:
            self.first_s = now
            if self.work is not None:
                self.work.outstanding_tokens -= self.uncached_tokens
        else:
            self.gaps_s.append(now - self.last_s)
        self.last_s = now
        self.num_output += num_tokens
