"""A real Prometheus that reads one server."""

import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from headwater.testing.ports import await_port, free_port

RULES = Path(__file__).parents[2] / "deploy/prometheus/alerts.yml"


class Prometheus:
    """`prometheus` with our rules, which scrapes `target` every second, until `stop`."""

    def __init__(self, folder: Path, target: str) -> None:
        port = free_port()
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "own", "static_configs": [{"targets": [target]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        await_port(port, self._process)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The current value of an expression; fails if Prometheus answers with an error."""
        params = {"query": expression}
        answer = httpx.get(f"{self._url}/query", params=params, timeout=10).json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Every rule and the result of its last evaluation."""
        groups = httpx.get(f"{self._url}/rules", timeout=10).json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def await_any(self, expression: str, *, seconds: float = 30) -> list[dict[str, Any]]:
        """The value of an expression, as soon as it has one."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := self.query(expression):
                return found
            time.sleep(0.1)
        raise AssertionError(f"nothing in {seconds} s: {expression}")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
