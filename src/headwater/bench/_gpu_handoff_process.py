"""The other process of `_gpu_handoff`, as the process that measures sees it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from headwater.errors import EngineDead

_TIMEOUT_S = 60.0


class Far:
    """The other process; it reads and writes one JSON object per line."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        self.tell(what)
        return self.listen()

    def listen(self) -> dict[str, Any]:
        """The next object that it writes."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                told: dict[str, Any] = json.loads(line)
                return told
        raise EngineDead("the other process of the benchmark ended")


@contextmanager
def far_process(*words: str) -> Iterator[Far]:
    """Start the other process with these arguments; it ends at the end of the `with`
    statement."""
    command = [sys.executable, "-m", "headwater.bench._gpu_handoff_far", *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Far(process)
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
            process.wait(_TIMEOUT_S)
        finally:
            process.kill()
