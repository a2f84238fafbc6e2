"""How often requests may be tried again: a budget, so that trouble does not multiply load."""


class RetryBudget:
    """Every request adds a share of a retry; a retry takes a whole one. Starts with a few."""

    def __init__(self, share: float, *, most: float = 10.0) -> None:
        self._share = share
        self._most = most
        self._left = most

    def deposit(self) -> None:
        """A request came."""
        self._left = min(self._left + self._share, self._most)

    def withdraw(self) -> bool:
        """Whether one retry may be made; it is counted."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
