"""Real servers for the storage tests: started on loopback at a free port, stopped afterwards."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headwater.clock import SystemClock
from headwater.storage import BlockFormat, Opening, StorageBackend, open_storage
from headwater.storage.file.backend import FileConfig, FileStorage
from headwater.testing.ports import await_port, free_port
from headwater.testing.storage import make_format
from tests.still import stand_still

MakeBackend = Callable[..., StorageBackend]
MakeFile = Callable[..., FileStorage]

FILE_BLOCK_BYTES = 4096


class ServerProcess:
    """A server that tests pause and kill."""

    _process: subprocess.Popen[bytes]

    def pause(self) -> None:
        """Stop the server with SIGSTOP: it stays connected, and is silent."""
        stand_still(self._process.pid)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class RedisServer(ServerProcess):
    """A separate redis-server."""

    def __init__(self, folder: Path, *more: str, config: Path | None = None) -> None:
        self._config = [] if config is None else [str(config)]
        self._program = shutil.which("redis-server") or shutil.which("valkey-server")
        if self._program is None:
            pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
        self._folder = folder
        self._more = more
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        assert self._program is not None
        flags = f"--bind 127.0.0.1 --port {self.port} --appendonly no --save".split()
        flags += ["", "--dir", str(self._folder)]
        self._process = subprocess.Popen(
            [self._program, *self._config, *flags, *self._more],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        if "--port" not in self._more:
            await_port(self.port, self._process)


class MooncakeMaster(ServerProcess):
    """A separate mooncake_master."""

    def __init__(self) -> None:
        program = Path(sys.executable).with_name("mooncake_master")
        if not program.exists():
            pytest.skip("mooncake is not installed (pip install 'headwater[mooncake]')")
        try:
            import mooncake.store  # noqa: F401 - only whether it can be loaded
        except ImportError as error:
            pytest.skip(f"mooncake cannot be loaded: {error}")
        port, metrics_port = free_port(), free_port()
        flags = [f"--rpc_port={port}", f"--metrics_port={metrics_port}"]
        flags += ["--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        self.address = f"127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [str(program), *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await_port(port, self._process)


class MooncakeLender(ServerProcess):
    """A process that lends memory to a pool and stays: blocks in it outlive the servers."""

    def __init__(self, master: MooncakeMaster, segment: str = "64 MB") -> None:
        port = free_port()
        flags = ["--host=127.0.0.1", f"--port={port}", "--metadata_server=P2PHANDSHAKE"]
        flags += [f"--master_server_address={master.address}"]
        flags += [f"--global_segment_size={segment}", "--local_buffer_size=16 MB"]
        self._process = subprocess.Popen(
            [str(Path(sys.executable).with_name("mooncake_client")), *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await_port(port, self._process)


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for all tests that do not stop it."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def mooncake_master() -> Iterator[MooncakeMaster]:
    """One master for all tests that do not stop it."""
    master = MooncakeMaster()
    yield master
    master.stop()


BACKENDS = (
    "memory",
    "file",
    "redis",
    pytest.param("mooncake", marks=pytest.mark.slow),
)


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def make_backend(
    request: pytest.FixtureRequest, backend_name: str, tmp_path: Path
) -> Iterator[MakeBackend]:
    """Opens backends of each kind on separate media; closes them at the end."""
    if backend_name == "file":
        settings = {"path": str(tmp_path / "blocks"), "slab_bytes": 8 << 20, "reserve_bytes": 0}
    elif backend_name == "redis":
        server = request.getfixturevalue("redis_server")
        settings = {"url": server.url, "key_prefix": f"{tmp_path}:"}
    elif backend_name == "mooncake":
        master = request.getfixturevalue("mooncake_master")
        settings = {
            "master": master.address,
            "segment_bytes": 1 << 26,
            "key_prefix": f"{tmp_path}:",
        }
    else:
        settings = {}
    opened = []

    def make(form: BlockFormat, **more: object) -> StorageBackend:
        opened.append(open_storage(backend_name, settings | more, Opening(format=form)))
        return opened[-1]

    yield make
    for backend in opened:
        backend.close()


@pytest.fixture
def make_file(tmp_path: Path) -> Iterator[MakeFile]:
    """Opens a small file backend on one directory."""
    opened = []

    def make(**more: object) -> FileStorage:
        settings = {
            "path": str(tmp_path / "blocks"),
            "reserve_bytes": 0,
            "slab_bytes": 8 * 8272,
        }
        form = more.pop("form", make_format(block_bytes=FILE_BLOCK_BYTES))
        clock = more.pop("clock", SystemClock())
        opened.append(FileStorage(FileConfig(**settings | more), form, clock))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for storage in opened:
        storage.close()
