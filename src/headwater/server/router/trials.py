"""How often, and around whom, one request is tried again."""

from headwater.server.router.choice import RouteChoice
from headwater.server.router.instance import Instance
from headwater.server.router.progress import StreamProgress
from headwater.server.router.retries import RetryBudget
from headwater.server.router.upstream import PEER_REFUSED, RETURNED, AttemptFailure


class Attempts:
    """Of one request. A stream that goes on elsewhere is no new load, so only requests that are
    made from the start again come out of the budget; both come to an end."""

    def __init__(self, most: int, budget: RetryBudget) -> None:
        self._left = most
        self._budget = budget
        self._num_tokens = 0
        self._has_failed = False
        self.tried: set[Instance] = set()
        self.returned: set[Instance] = set()
        """Those of `tried` that gave it back for want of room."""

    def may_go_on(self, progress: StreamProgress) -> bool:
        """Whether there may be another attempt; one from the start again is paid for here."""
        if self._left == 0:
            return False
        if progress.has_begun:
            return progress.can_continue and not progress.is_whole
        return not self._has_failed or self._budget.withdraw()

    def note(
        self, route: RouteChoice, failure: AttemptFailure, progress: StreamProgress
    ) -> None:
        """An attempt failed: who is not to be tried again, and how many are left."""
        self._has_failed = True
        is_returned = failure.reason == RETURNED
        if is_returned:
            self.returned.add(route.server)
        self.tried.add(_culprit(route, failure))
        # What was given back after more of it was generated has come nearer to its end.
        if not is_returned or progress.num_tokens == self._num_tokens:
            self._left -= 1
        self._num_tokens = progress.num_tokens


def _culprit(route: RouteChoice, failure: AttemptFailure) -> Instance:
    """Who is not to be tried again: the prefill instance that refused, or who was asked."""
    if failure.reason == PEER_REFUSED and route.prefill is not None:
        return route.prefill
    return route.server
