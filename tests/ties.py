"""Near ties: the best two logits are so close that another order of additions may swap them.
They are logged; no test is repeated until it passes."""

import logging
from typing import Any

log = logging.getLogger(__name__)

NEAR_TIE = 1e-4


def log_near_ties(choice: dict[str, Any]) -> None:
    """Log the near ties of a choice of /v1/completions that was requested with two logprobs."""
    for at, top in enumerate(choice["logprobs"]["top_logprobs"]):
        best = sorted(top.values(), reverse=True)
        if len(best) > 1 and best[0] - best[1] < NEAR_TIE:
            log.warning("near tie at token %d: %.2g apart", at, best[0] - best[1])
