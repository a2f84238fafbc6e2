"""`headwater bench metrics` runs and reports every figure."""

import json

import pytest

from headwater.bench.metrics import main


@pytest.mark.slow
def test_the_metrics_benchmark_reports_the_cost_of_counting(capsys):
    """The report has the costs as shares of a step."""
    assert main(["--quick", "--json", "--batch", "4"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["batch"] == 4
    assert 0 < result["record_us_a_step"] < result["step_us"]
    assert {"record_share_of_a_step", "scrape_share_of_time", "look_share_of_time"} <= set(
        result
    )
