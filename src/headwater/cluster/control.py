"""The control socket of a running cluster: a request is one line of JSON, and so is the answer.

It is a Unix socket in a folder that only its user may enter; the file system is the
authentication.
"""

import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from headwater.cluster.supervisor import Command
from headwater.errors import ConfigError

_MAX_LINE = 1 << 20
_ANSWER_S = 30.0
_POLL_S = 0.1


class ClusterFolder:
    """The folder in which a cluster keeps its socket, its token and its logs."""

    def __init__(self, name: str) -> None:
        self.path = _state_folder() / name

    def make(self) -> None:
        """Create the folder, for this user only."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.chmod(0o700)

    @property
    def socket(self) -> Path:
        return self.path / "control"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def token(self) -> Path:
        return self.path / "peer-token"


def _state_folder() -> Path:
    """`$HEADWATER_STATE`, or `headwater/clusters` in the state folder of this user."""
    if given := os.environ.get("HEADWATER_STATE"):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local/state") / "headwater/clusters"


def running_clusters() -> list[str]:
    """Names of the clusters of this user that run now."""
    sockets = sorted(_state_folder().glob("*/control"))
    return [path.parent.name for path in sockets if is_answered(path)]


class ControlServer:
    """Accepts commands for a supervisor."""

    def __init__(self, path: Path, ask: Callable[[Command], None]) -> None:
        """Raises ConfigError if a cluster of that name is already running."""
        self._path, self._ask = path, ask
        if is_answered(path):
            raise ConfigError(
                f"a cluster named {path.parent.name!r} is already running; stop it with "
                "headwater down, or give another name"
            )
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(str(path))
        except OSError as exc:
            raise ConfigError(
                f"cannot make the control socket {path}: {exc}; set HEADWATER_STATE to a folder "
                "with a shorter path"
            ) from exc
        path.chmod(0o600)
        self._socket.listen(8)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def close(self) -> None:
        """Stop accepting commands."""
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(_ANSWER_S)
            try:
                request = msgspec.json.decode(_read_line(connection), type=dict[str, Any])
                answers: SimpleQueue[dict[str, Any]] = SimpleQueue()
                verb = str(request.pop("verb", ""))
                if "spec" in request:
                    request["spec"] = _spec(request["spec"])
                self._ask(Command(verb, request, answers.put))
                answer = answers.get(timeout=_ANSWER_S)
            except (OSError, ValueError, Empty, ConfigError) as exc:
                answer = {"error": str(exc) or "no answer in time"}
            try:
                connection.sendall(msgspec.json.encode(answer) + b"\n")
            except OSError:
                return  # the client has disconnected


def ask_cluster(name: str, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Send one command to the cluster of that name. Raises ConfigError with the message of the
    cluster."""
    path = ClusterFolder(name).socket
    connection = socket.socket(socket.AF_UNIX)
    with connection:
        connection.settimeout(_ANSWER_S)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError) as exc:
            raise ConfigError(
                f"no cluster named {name!r} is running; headwater up starts one"
            ) from exc
        except OSError as exc:
            raise ConfigError(f"cluster {name!r} does not answer: {exc.strerror}") from exc
        try:
            connection.sendall(msgspec.json.encode({"verb": verb, **arguments}) + b"\n")
            answer = msgspec.json.decode(_read_line(connection), type=dict[str, Any])
        except (OSError, ValueError) as exc:
            raise ConfigError(
                f"the cluster {name!r} did not answer: {exc}; see headwater logs"
            ) from exc
    if "error" in answer:
        raise ConfigError(str(answer["error"]))
    return answer


def _spec(data: object) -> Any:  # noqa: ANN401 -- a ClusterSpec, for the supervisor
    from headwater.cluster.spec import ClusterSpec

    spec = msgspec.convert(data, ClusterSpec)
    spec.check()
    return spec


def wait_until_ended(name: str) -> None:
    """Return when the cluster of that name has ended. It keeps its socket until then."""
    path, pause = ClusterFolder(name).socket, threading.Event()
    while is_answered(path):
        pause.wait(_POLL_S)


def is_answered(path: Path) -> bool:
    """Whether a running cluster listens on this socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _read_line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(65536)
        if not part:
            break
        data += part
        if len(data) > _MAX_LINE:
            raise ValueError("the message is too long")
    return data
