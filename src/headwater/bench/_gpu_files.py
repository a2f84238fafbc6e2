"""The files of `headwater bench gpu --out`: one for each part, with where its figures come from."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = Path(__file__).parents[3]
_VERSIONS = {"torch": "torch", "triton": "Triton", "transformers": "transformers"}


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program as an exception does, so that servers are stopped and files
    written."""

    def end(signum: int, frame: FrameType | None) -> None:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_part(
    folder: Path,
    part: str,
    found: Mapping[str, Any],
    *,
    commit: str | None,
    settings: Mapping[str, Any],
    **about: Any,  # noqa: ANN401 -- status, seconds, ceilings
) -> None:
    """Write `folder/part.json`, complete or not at all."""
    content = {
        "part": part,
        **about,
        "commit": commit or measured_commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": _machine(str(settings["device"])),
        "command": _command(part, settings),
        "settings": settings,
        "result": found,
    }
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{part}.json"
    draft = target.with_suffix(".part")
    draft.write_text(json.dumps(content, indent=1, default=float) + "\n", encoding="utf-8")
    draft.rename(target)


def measured_commit() -> str | None:
    """The commit of this source tree, with `+` if files were changed; None outside git."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    if not commit:
        return None
    return f"{commit}+" if git("status", "--porcelain", "--untracked-files=no") else commit


def _machine(device: str) -> str:
    versions = ", ".join(
        f"{name} {version}"
        for package, name in _VERSIONS.items()
        if (version := _version(package))
    )
    return f"{_device_name(device)} with {os.cpu_count()} cores, {versions}"


def _device_name(device: str) -> str:
    if device == "cpu":
        return "no GPU"
    from headwater.bench._gpu_engine import gpu_name

    return f"one {gpu_name()}"


def _version(package: str) -> str | None:
    """Major and minor version of a package; None if it is not installed."""
    try:
        return ".".join(metadata.version(package).split(".")[:2])
    except metadata.PackageNotFoundError:
        return None


def _command(part: str, settings: Mapping[str, Any]) -> str:
    """The command that measures this part alone."""
    words = ["python -m headwater.bench gpu", "--parts", part]
    words += ["--model", settings["model"]] if settings["model"] != "8b" else []
    words += ["--device", "cpu"] if settings["device"] == "cpu" else []
    words += ["--quick"] if settings["quick"] else []
    return " ".join(words)
