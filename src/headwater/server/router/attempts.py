"""Limits on how often one request is sent to an instance, and which instances are excluded."""

from headwater.server.router.instance import Instance
from headwater.server.router.route_selector import RouteChoice
from headwater.server.router.stream_progress import StreamProgress
from headwater.server.router.upstream import PEER_REFUSED, RETURNED, AttemptFailure


class RetryBudget:
    """Limits retries over all requests, so that an outage does not multiply the load.

    Each request adds `share` of a retry, a retry takes one, and at most `most` are saved up.
    """

    def __init__(self, share: float, *, most: float = 10.0) -> None:
        self._share = share
        self._most = most
        self._left = most

    def deposit(self) -> None:
        """Count a new request."""
        self._left = min(self._left + self._share, self._most)

    def withdraw(self) -> bool:
        """Take one retry; False when none is left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Attempts:
    """The attempts of one request.

    A restart from the first token takes a retry from the budget. Resuming a stream on another
    instance takes none, because it adds no load. The number of attempts bounds both.
    """

    def __init__(self, max_attempts: int, budget: RetryBudget) -> None:
        self._left = max_attempts
        self._budget = budget
        self._num_tokens = 0
        self._has_failed = False
        self.tried: set[Instance] = set()
        self.returned: set[Instance] = set()
        """The part of `tried` that gave the request back because its KV cache was full."""

    def may_continue(self, progress: StreamProgress) -> bool:
        """Whether another attempt is allowed. A restart takes its retry from the budget here."""
        if self._left == 0:
            return False
        if progress.has_begun:
            return progress.can_continue and not progress.is_whole
        return not self._has_failed or self._budget.withdraw()

    def record_failure(
        self, route: RouteChoice, failure: AttemptFailure, progress: StreamProgress
    ) -> None:
        """Exclude the instance that failed and count the attempt."""
        self._has_failed = True
        is_returned = failure.reason == RETURNED
        if is_returned:
            self.returned.add(route.server)
        self.tried.add(_failed_instance(route, failure))
        # A request that was given back after new tokens has made progress and is not counted,
        # so long outputs on full instances end too.
        if not is_returned or progress.num_tokens == self._num_tokens:
            self._left -= 1
        self._num_tokens = progress.num_tokens


def _failed_instance(route: RouteChoice, failure: AttemptFailure) -> Instance:
    """The prefill instance when it refused, otherwise the serving instance."""
    if failure.reason == PEER_REFUSED and route.prefill is not None:
        return route.prefill
    return route.server
