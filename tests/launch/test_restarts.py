"""How often a process is started again."""

from headwater.launch.restarts import WINDOW_S, RestartBudget


def test_a_budget_counts_within_its_window():
    """Three restarts in ten minutes are allowed; the fourth is refused until the first is old
    enough."""
    budget = RestartBudget(3)
    assert [budget.take(float(now)) for now in range(4)] == [0, 1, 2, None]
    assert budget.take(WINDOW_S) is None
    assert budget.take(WINDOW_S + 0.5) == 2
    assert budget.take(2 * WINDOW_S + 2) == 0


def test_a_budget_of_zero_refuses_the_first_restart():
    """With `--max-engine-restarts 0` no restart is allowed."""
    assert RestartBudget(0).take(0.0) is None
