"""Runs instances on nodes of a Ray cluster: one actor for each instance, with `headwater serve`
as its child.

Ray only places and watches the processes. Tokens and KV blocks never pass through Ray. When a
node is lost, its actors are gone; the supervisor then starts their instances again, and Ray
places them on other nodes.
"""

import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from headwater.cluster.host import (
    LogFile,
    ProcessEvent,
    RunningProcess,
    Tell,
    exit_text,
    read_events,
)
from headwater.cluster.processes import ProcessSpec
from headwater.cluster.spec import RaySpec
from headwater.errors import ConfigError
from headwater.launch.parent_watch import VARIABLE

Actor: TypeAlias = Any
"""A handle of a Ray actor."""

_POLL_S = 0.5
_MAX_LINES = 10_000
_SHARED = ("HEADWATER_PEER_TOKEN", "HEADWATER_API_KEY", "OMP_NUM_THREADS", "PYTHONPATH")
"""Environment variables that instances get from this process."""


def _ray() -> Any:  # noqa: ANN401 -- a module that may be missing
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as exc:
        raise ConfigError("--ray needs Ray: pip install 'headwater[ray]'") from exc


class NodeProcess:
    """Runs in the actor, on its node: one `headwater` process and its output."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        ray = _ray()
        address = ray.util.get_node_ip_address()
        words = [*arguments, *_listen_words(arguments, address)]
        lifeline, self._held = os.pipe()
        self._child = subprocess.Popen(
            [sys.executable, "-m", "headwater", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | dict(environment) | {VARIABLE: str(lifeline)},
            pass_fds=(lifeline,),
            start_new_session=True,
        )
        os.close(lifeline)
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def place(self) -> str:
        """Process id and node."""
        return f"pid {self._child.pid} on {socket.gethostname()}"

    def poll(self) -> tuple[list[str], int | None]:
        """Lines since the last call, and the exit code when the process has ended and
        everything was read."""
        code = self._child.poll()
        if code is not None:
            self._reader.join(5.0)
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return lines, code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self._child.poll() is None:
            self._child.send_signal(number)

    def _read(self) -> None:
        assert self._child.stdout is not None, "a pipe was requested"
        with self._child.stdout as lines:
            for line in lines:
                self._lines.append(line)


def _listen_words(arguments: Sequence[str], address: str) -> list[str]:
    """Flags that make an instance listen where other nodes can reach it, unless the cluster
    file has an address."""
    flags = {"--host": address, "--peer-host": address, "--link-host": address}
    if "--splitwise-role" not in arguments:
        del flags["--peer-host"], flags["--link-host"]
    return [word for flag, at in flags.items() if flag not in arguments for word in (flag, at)]


class RayProcess:
    """An instance on some node, seen from the supervisor."""

    def __init__(
        self, process: ProcessSpec, run: int, tell: Tell, actor: Actor, log: LogFile
    ) -> None:
        self._name, self._run, self._tell = process.name, run, tell
        self._actor, self._log = actor, log
        self.place = "being placed"
        self._is_killed = threading.Event()
        threading.Thread(target=self._watch, name=process.name, daemon=True).start()

    def stop(self) -> None:
        self._actor.send_signal.remote(int(signal.SIGTERM))

    def kill(self) -> None:
        ray = _ray()
        self._is_killed.set()
        ray.kill(self._actor)

    def _watch(self) -> None:
        """Watch until the process, its actor or its node has ended."""
        ray = _ray()
        how = "the loss of its node"
        try:
            self.place = ray.get(self._actor.place.remote())
            while True:
                lines, code = ray.get(self._actor.poll.remote())
                for line in lines:
                    self._log.write(line)
                    event = read_events(self._name, self._run, line)
                    if event is not None:
                        self._tell(event)
                if code is not None:
                    how = exit_text(code)
                    break
                self._is_killed.wait(_POLL_S)
        except ray.exceptions.RayError as exc:
            if self._is_killed.is_set():
                how = "signal 9"
            else:
                self._log.write(f"{type(exc).__name__}: {exc}\n")
        self._tell(ProcessEvent(self._name, self._run, is_exit=True, exit_text=how))
        ray.kill(self._actor)


class RayHost:
    """A Ray cluster. Ray assigns GPUs and nodes."""

    def __init__(self, spec: RaySpec, address: str | None, logs: Path) -> None:
        """Raises ConfigError when Ray is not installed or the cluster does not answer."""
        ray = _ray()
        self._spec, self._logs = spec, logs
        self.assigns_gpus = True
        try:
            ray.init(
                address=address or "auto", logging_level=logging.ERROR, log_to_driver=False
            )
        except (ConnectionError, ValueError, RuntimeError) as exc:
            raise ConfigError(
                f"cannot reach the Ray cluster {address or '(auto)'}: {exc}; start one with "
                "ray start --head"
            ) from exc

    def start(self, process: ProcessSpec, run: int, tell: Tell) -> RunningProcess:
        ray = _ray()
        shared = {name: os.environ[name] for name in _SHARED if name in os.environ}
        actor = (
            ray.remote(NodeProcess)
            .options(
                num_cpus=self._spec.cpus_per_instance,
                num_gpus=process.num_gpus,
                scheduling_strategy="SPREAD" if self._spec.strategy == "SPREAD" else "DEFAULT",
                max_restarts=0,
            )
            .remote(list(process.arguments), shared | dict(process.environment))
        )
        log = LogFile(self._logs / f"{process.name}.log")
        return RayProcess(process, run, tell, actor, log)

    def close(self) -> None:
        _ray().shutdown()
