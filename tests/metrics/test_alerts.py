"""The alert rules in Prometheus' own test tool."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/alerts.yml"
CASES = Path(__file__).with_name("alerts.yml")


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="needs promtool (Debian: apt-get install prometheus)",
)
def test_alerts_fire_for_problems_only(tmp_path):
    """A quiet day of an instance raises no alert; an instance with every problem raises all."""
    shutil.copy(RULES, tmp_path / RULES.name)
    shutil.copy(CASES, tmp_path / "cases.yml")

    found = subprocess.run(
        ["promtool", "test", "rules", "cases.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert found.returncode == 0, found.stdout + found.stderr


def test_no_alert_is_without_a_case():
    """Every rule has a case."""
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    (told,) = yaml.safe_load(CASES.read_text())["tests"][1]["promql_expr_test"]

    assert [sample["labels"] for sample in told["exp_samples"]] == sorted(
        f'{{alertname="{rule["alert"]}"}}' for rule in rules
    )
