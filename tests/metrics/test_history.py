"""The points of the last minutes."""

from headwater.metrics.history import INTERVAL_S, SPAN_S, HistoryPoint, RateHistory
from headwater.metrics.rates import ServerRates

RATES = ServerRates(
    output_tokens=1.0,
    prompt_tokens=1.0,
    by_source={},
    computed_by_reason={},
    links={},
    ttft=None,
    itl=None,
)


def make_point(unix_s):
    return HistoryPoint(
        unix_s=unix_s,
        elapsed_s=INTERVAL_S,
        rates=RATES,
        minute_ttft=None,
        minute_itl=None,
        running=0,
        waiting=0,
        duplicates=0,
        unwritten=0,
    )


def test_history_is_bounded_and_covers_its_span():
    """However long a server runs, the last ten minutes are kept and little more."""
    history = RateHistory()
    for number in range(5000):
        history.add(make_point(number * INTERVAL_S))

    points = history.after(0.0)

    assert points[-1].unix_s - points[0].unix_s >= SPAN_S >= 600
    assert len(points) < 400


def test_a_reader_gets_only_what_is_new():
    """The reader gets the points after a given time, oldest first."""
    history = RateHistory()
    for unix_s in (10.0, 12.0, 14.0):
        history.add(make_point(unix_s))

    assert [point.unix_s for point in history.after(10.0)] == [12.0, 14.0]
    assert history.after(14.0) == []
