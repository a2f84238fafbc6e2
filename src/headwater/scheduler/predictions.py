"""Expected against actual seconds, of loads and of computing prompts: is pricing right?"""

from typing import NamedTuple


class PredictionTotals(NamedTuple):
    """Sums over all predictions of one kind."""

    num: int = 0
    expected_s: float = 0.0
    actual_s: float = 0.0
    error_s: float = 0.0
    """Sum of the differences, each without its sign."""


class PredictionLog:
    """Sums by kind: `host_to_device`, `storage_to_host`, `prefill`."""

    def __init__(self) -> None:
        self.totals: dict[str, PredictionTotals] = {}

    def add(self, kind: str, expected_s: float, actual_s: float) -> None:
        """Something was expected to take `expected_s` and took `actual_s`."""
        num, expected, actual, error = self.totals.get(kind, PredictionTotals())
        self.totals[kind] = PredictionTotals(
            num + 1,
            expected + expected_s,
            actual + actual_s,
            error + abs(actual_s - expected_s),
        )
