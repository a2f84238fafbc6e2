"""Models by their Hugging Face name, against a hub on this machine."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import save_file

from headwater.errors import ConfigError
from headwater.launch.hub import find_model, is_hub_name

SHA = "a" * 40
NAME = "org/tiny-model"

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "dtype": "float32",
}


class FakeHub(ThreadingHTTPServer):
    """One repository in a folder, and the files that were requested."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.status = 200
        self.sent: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        return None

    def _answer(self, *, with_body: bool) -> None:
        path = urlsplit(self.path).path
        files = [file for file in self.server.folder.rglob("*") if file.is_file()]
        names = [str(file.relative_to(self.server.folder)) for file in files]
        if self.server.status != 200:
            self.send_response(self.server.status)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": _oid(file)}
                for name, file in zip(names, files, strict=True)
            ]
            self._send(json.dumps(tree).encode(), with_body)
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in names]
            info = {"id": NAME, "sha": SHA, "siblings": siblings, "tags": []}
            self._send(json.dumps(info).encode(), with_body)
        else:
            self._send_file(path.partition(f"/resolve/{SHA}/")[2], with_body)

    def _send_file(self, name: str, with_body: bool) -> None:
        file = self.server.folder / name
        if not file.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            return
        content = file.read_bytes()
        if with_body:
            self.server.sent.append(name)
        self._send(content, with_body, etag=_oid(file))

    def _send(self, content: bytes, with_body: bool, etag: str | None = None) -> None:
        wanted, total = self.headers.get("Range"), len(content)
        if wanted is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            content = content[int(first) : int(last or total) + 1]
        self.send_response(200 if wanted is None else 206)
        if etag is not None:
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", SHA)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with one small model, and files that must not be downloaded."""
    folder = tmp_path / "repository"
    (folder / "original").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": np.zeros((100, 10), dtype=np.float32)}, folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"never")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    (folder / "original" / "model.safetensors").write_bytes(b"never")
    with FakeHub(folder) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


Ask = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ask(hub: FakeHub, tmp_path: Path) -> Ask:
    """Run Python code, or `headwater` with arguments, with a separate cache and this hub."""

    def run(*arguments: str, code: str | None = None, **more: str) -> Any:
        environ = {
            **{name: value for name, value in os.environ.items() if "HF_" not in name},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "cache"),
            **more,
        }
        command = ["-m", "headwater"] if code is None else ["-c", code]
        return subprocess.run(
            [sys.executable, *command, *arguments],
            check=False, capture_output=True, text=True, timeout=60, env=environ,
        )  # fmt: skip

    return run


FIND = (
    "import sys; from headwater.launch.hub import find_model; print(find_model(*sys.argv[1:]))"
)


def test_a_name_is_downloaded_once_and_then_found_offline(hub: FakeHub, ask: Ask) -> None:
    """Only safetensors and small text files are downloaded; the second time nothing is
    requested."""
    first = ask(NAME, code=FIND)
    sent = sorted(hub.sent)
    hub.sent.clear()
    hub.status = 500
    second = ask(NAME, code=FIND, HF_HUB_OFFLINE="1")

    assert first.returncode == 0, first.stderr
    assert sent == ["config.json", "model.safetensors", "tokenizer.json"]
    assert second.stdout == first.stdout
    assert f"name='{NAME}'" in first.stdout
    assert hub.sent == []


def test_check_reads_headers_and_downloads_no_weights(hub: FakeHub, ask: Ask) -> None:
    """A model can be checked before it is downloaded."""
    done = ask("check", NAME, "--device-gib", "4", "--json")

    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["weights"]["bytes"] == 4000
    cached = [
        path
        for path in Path(os.fspath(hub.folder.parent / "cache")).rglob("*.safetensors")
        if path.is_file()
    ]
    assert cached == []


def test_a_refused_model_is_not_downloaded(hub: FakeHub, ask: Ask) -> None:
    """The config of a refused model is read first, and its weights are not downloaded."""
    (hub.folder / "config.json").write_text(json.dumps({**CONFIG, "model_type": "mamba"}))

    done = ask("serve", NAME, "--port", "0")

    assert done.returncode == 1
    assert "recurrent" in done.stderr
    assert "model.safetensors" not in hub.sent


def test_offline_and_not_cached_says_what_to_do(ask: Ask) -> None:
    """The message is one line, without a traceback."""
    done = ask("serve", NAME, "--port", "0", HF_HUB_OFFLINE="1")

    assert done.returncode == 1
    assert f"{NAME} is not in the local cache and was not downloaded" in done.stderr
    assert "hf download" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_name_gets_a_message(hub: FakeHub, ask: Ask) -> None:
    """A model that does not exist and a private one look the same from outside."""
    hub.status = 404
    done = ask("check", NAME)

    assert done.returncode == 1
    assert "there is no such model" in done.stdout


def test_a_folder_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing folder is never looked up elsewhere; paths are not names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)

    assert not is_hub_name("org/name")
    assert not is_hub_name("./org/name2")
    assert not is_hub_name("/org/name2")
    assert not is_hub_name("../name")
    assert not is_hub_name("a/b/c")
    assert is_hub_name("Qwen/Qwen3-0.6B")
    assert find_model("org/name") == ("org/name", None)
    assert find_model(None) == (None, None)
    with pytest.raises(ConfigError, match="--revision"):
        find_model("org/name", "main")
