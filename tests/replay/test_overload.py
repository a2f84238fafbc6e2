"""The diagnoses of a replay: overload, ceiling, busy links."""

import pytest

from headwater.replay.ceiling import reusable_tokens
from headwater.replay.report import kept_growing, make_report
from headwater.replay.simulator import Simulator
from tests.replay.traces import gib, make_config, make_request


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ([float(n) for n in range(100)], True),
        ([float(n) for n in range(80)] + [40.0, 0.0], True),
        ([float(n % 40) for n in range(120)], False),
        ([0.0] * 90 + [100.0] * 10, False),
        ([float(n) for n in range(80)] + [5.0] * 20, False),
        ([float(n) for n in range(50)] + [0.0] * 150, False),
        ([5.0] * 100, False),
        ([0.0] * 100, False),
        ([], False),
    ],
    ids=[
        "grows",
        "is worked off at the end",
        "waves",
        "burst",
        "is worked off before the end",
        "early",
        "level",
        "empty",
        "none",
    ],
)
def test_a_queue_that_kept_growing_is_an_overload(waiting, expected):
    """A burst, waves or a constant queue are not an overload: the machines catch up."""
    assert kept_growing(waiting) is expected


def test_a_queue_that_grows_until_the_last_arrival_is_an_overload_though_it_is_worked_off():
    """All requests are served in the end, long after the last arrival."""
    requests = [make_request(range(3 * n, 3 * n + 3), at_s=0.01 * n) for n in range(120)]

    report = make_report(Simulator(make_config(), requests).run())

    assert report["duration_s"] > 3 * requests[-1].arrival_s
    assert report["queue"]["overloaded"]


def test_the_ceiling_counts_whole_leading_blocks_that_came_before():
    """The second request repeats two blocks of the first; the last token is always computed."""
    requests = [make_request([1, 2, 3]), make_request([1, 2, 4]), make_request([1, 2, 3])]

    assert list(reusable_tokens(requests, 16)) == [0, 1024, 1264]


def test_a_link_that_is_busy_after_the_last_token_is_never_busier_than_all_the_time():
    """Writes to the host continue after the last request has ended."""
    requests = [make_request(range(3 * n, 3 * n + 3), at_s=0.0, output=1) for n in range(2)]

    report = make_report(
        Simulator(make_config(host_gib=gib(512), write_policy="write_through"), requests).run()
    )

    assert 0 < report["busy_share_per_link"]["device_to_host"] <= 1
