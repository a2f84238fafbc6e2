"""What a session policy has learned, as a value that another engine can start with.

It has no step sizes: an engine that starts with it learns from its own traffic as fast as one
that starts with nothing.
"""

from dataclasses import dataclass

import numpy as np

from headwater.cache.policy.hazard import NUM_BINS, NUM_COLUMNS, Floats
from headwater.cache.policy.traits import NUM_FEATURES
from headwater.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Weights of every feature at every age, and the traces they were learned from."""

    bias: Floats
    features: Floats
    learned_from: tuple[str, ...] = ()
    """SHA-256 of each trace, in hex."""

    def __post_init__(self) -> None:
        for name, array, shape in (
            ("bias", self.bias, (NUM_BINS,)),
            ("features", self.features, (NUM_FEATURES, NUM_COLUMNS)),
        ):
            if array.shape != shape:
                raise ConfigError(f"{name} must have the shape {shape}, got {array.shape}")
            if not np.isfinite(array).all():
                raise ConfigError(
                    f"{name} has entries that are not finite numbers; learn the weights again"
                )
