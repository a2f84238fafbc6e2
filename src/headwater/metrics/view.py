"""A snapshot of an engine for the dashboard: counts, sequences, the shape of the tree."""

from dataclasses import dataclass, field

from headwater.cache.outline import Outline
from headwater.metrics.stats import EngineStats
from headwater.scheduler.stats import SequenceView


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewLimits:
    """How much of a view is requested. The cost of a view depends on these limits, not on the
    size of the cache."""

    max_sequences: int = 0
    max_nodes: int = 0
    """0 leaves the tree out."""

    max_depth: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """The state of an engine between two steps."""

    stats: EngineStats
    sequences: list[SequenceView] = field(default_factory=list)
    tree: Outline | None = None
