"""Predicts when blocks are used again: a hazard for each age, learned online from past returns.

Each run of blocks belongs to a *class*, which is a set of features. The probability that the
run is used again in age bin b, if it was not used in an earlier bin, is

    q = sigmoid(bias[b] + sum over its features f of (weight[f] + weight[f, age group of b]))

The hazards give the *hit density* of a run at each age: the best ratio of expected hits to
block-seconds if the run is kept from now on, over all times at which it could be given up.
Evicting the lowest density first is the order that an optimal price for block-seconds would
give.
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

EDGES = (
    0, 3, 6, 12, 20, 30, 45, 60, 80, 105, 135, 170, 220,
    280, 360, 460, 600, 800, 1050, 1400, 1900, 2600, 3600,
)  # fmt: skip
"""Start of each age bin in seconds. After the last one, no return is expected."""

NUM_BINS = len(EDGES) - 1
GROUP_ENDS = (30, 105, 360)
"""End of each age group in seconds; the last group has no end."""

NUM_COLUMNS = len(GROUP_ENDS) + 2
"""Weights of one feature: one for all ages, then one for each age group."""

ROW = 32
"""Entries of one class in the table of densities: one for each bin, then zeros."""

_FIRST_BIAS = -4.0
_RATE = 0.3
_BIAS_SHARE, _WEIGHT_SHARE, _GROUP_SHARE = 1.0, 0.5, 0.3
_LOW, _HIGH = -12.0, 6.0


class HazardModel:
    """Weights, trained with one AdaGrad step per batch of samples, and the table of densities.

    There are `num_features` features. Feature 0 means "no feature"; its weight stays 0.
    """

    def __init__(
        self,
        num_features: int,
        features_per_class: int,
        priors: Mapping[int, Mapping[int, float]] | None = None,
    ) -> None:
        """`priors` are the initial weights, by feature and column."""
        self._edges = np.array(EDGES, dtype=np.float64)
        self._widths = np.diff(self._edges)
        self._group = np.searchsorted(GROUP_ENDS, self._edges[:-1], side="right")
        self.bias = np.full(NUM_BINS, _FIRST_BIAS)
        self.weights = np.zeros((num_features, NUM_COLUMNS))
        for feature, columns in (priors or {}).items():
            for column, weight in columns.items():
                self.weights[feature, column] = weight
        self._bias_squares = np.ones(NUM_BINS)
        self._squares = np.ones((num_features, NUM_COLUMNS))
        self._features = np.zeros((64, features_per_class), dtype=np.int64)
        """Features by class. The array is widened only when a class has more features, because
        every column costs time."""
        self.num_classes = 0
        self._num_fixed = 0
        self.densities = np.zeros(64 * ROW)
        """Densities, at index class * ROW + bin."""

    def add_fixed(self, density: float) -> int:
        """Add a class that always has this density and return its number. Call before
        `add_class`."""
        new = self.num_classes
        self.densities[new * ROW : (new + 1) * ROW] = density
        self.num_classes = self._num_fixed = new + 1
        return new

    def add_class(self, features: tuple[int, ...], like: int | None) -> int:
        """Add a class with these features and return its number. It has the densities of the
        class `like` until the next `refresh`."""
        new = self.num_classes
        if new == len(self._features):
            self._features = np.concatenate((self._features, np.zeros_like(self._features)))
            self.densities = np.concatenate((self.densities, np.zeros_like(self.densities)))
        missing = len(features) - self._features.shape[1]
        if missing > 0:
            self._features = np.pad(self._features, ((0, 0), (0, missing)))
        self._features[new, : len(features)] = features
        self.num_classes += 1
        table = self.densities.reshape(-1, ROW)
        if like is None:
            hazards = self._hazards(self._features[new : new + 1])
            table[new, :NUM_BINS] = self._all_densities(hazards)[0]
        else:
            table[new] = table[like]
        return new

    def refresh(self, first: int = 0) -> None:
        """Compute the densities of the classes from `first` on with the current weights."""
        first = max(first, self._num_fixed)
        table = self.densities.reshape(-1, ROW)[first : self.num_classes]
        hazards = self._hazards(self._features[first : self.num_classes])
        table[:, :NUM_BINS] = self._all_densities(hazards)

    def learn(self, classes: Ints, bins: Ints, returned: NDArray[np.bool_]) -> None:
        """Make one training step. Each sample says whether a run of a class was used again in a
        bin."""
        features, groups = self._features[classes], self._group[bins] + 1
        weights = self.weights
        logits = self.bias[bins] + weights[features, 0].sum(axis=1)
        logits += weights[features, groups[:, None]].sum(axis=1)
        gradient = (_sigmoid(logits) - returned) / 3
        squares = gradient * gradient
        self._bias_squares += np.bincount(bins, squares, NUM_BINS)
        step = np.bincount(bins, gradient, NUM_BINS) / np.sqrt(self._bias_squares)
        self.bias -= _RATE * _BIAS_SHARE * step
        self._step(features, gradient, squares, groups)

    def _step(self, features: Ints, gradient: Floats, squares: Floats, groups: Ints) -> None:
        rows, columns = self.weights.shape
        per = features.shape[1]
        for share, column in ((_WEIGHT_SHARE, None), (_GROUP_SHARE, groups)):
            at = features * columns
            if column is not None:
                at = at + column[:, None]
            flat = at.ravel()
            shape = (rows, columns)
            size = rows * columns
            summed = np.bincount(flat, np.repeat(gradient, per), size).reshape(shape)
            self._squares += np.bincount(flat, np.repeat(squares, per), size).reshape(shape)
            self.weights -= _RATE * share * summed / np.sqrt(self._squares)
        self.weights[0] = 0.0

    def _hazards(self, features: Ints) -> Floats:
        """The hazard of each class in each bin."""
        sums = self.weights[features].sum(axis=1)
        return _sigmoid(self.bias + sums[:, :1] + sums[:, 1 + self._group])

    def _all_densities(self, hazards: Floats) -> Floats:
        """Hits per block-second for each class and age, if a run is given up at the best later
        time."""
        chances = np.ascontiguousarray(hazards.T)
        best = np.empty_like(chances)
        value, cost, ratio = np.zeros((3, *chances.shape))
        spent = self._widths[:, None] * (1 - chances / 2)
        left = 1 - chances
        for b in range(NUM_BINS - 1, -1, -1):
            # The run is given up after bin b, or later if it was not used in b.
            value[b:] *= left[b]
            value[b:] += chances[b]
            cost[b:] *= left[b]
            cost[b:] += spent[b]
            np.divide(value[b:], cost[b:], out=ratio[b:])
            np.max(ratio[b:], axis=0, out=best[b])
        return best.T


def _sigmoid(logits: Floats) -> Floats:
    clamped: Floats = np.minimum(np.maximum(logits, _LOW), _HIGH)
    return 1 / (1 + np.exp(-clamped))
