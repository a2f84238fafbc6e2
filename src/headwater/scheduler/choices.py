"""Several answers to one prompt: how the sampling of each differs from the first's."""

from dataclasses import replace

from headwater.scheduler.request import SamplingParams

SEED_RANGE = 1 << 63
"""Seeds are below this."""


def seed_of_choice(seed: int, choice: int) -> int:
    """Choices of one request differ, and differ the same way each time."""
    return (seed + choice) % SEED_RANGE


def params_of_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """How the tokens of the `choice`-th answer are chosen; the first's are as asked."""
    if choice == 0:
        return params
    return replace(params, seed=seed_of_choice(params.seed, choice))
