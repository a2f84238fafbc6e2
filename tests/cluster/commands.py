"""The commands that an operator gives to a running cluster."""

import json
import subprocess
import sys


class ClusterCommands:
    """Commands of `headwater`, with the environment of one cluster."""

    _environment: dict[str, str]

    def ask(self, *words):
        """Run a command and return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "headwater", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def members(self):
        return {m["name"]: m for m in json.loads(self.ask("status", "--json"))["members"]}
