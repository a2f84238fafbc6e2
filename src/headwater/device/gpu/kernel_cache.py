"""The folder of compiled kernels, and a count of kernels compiled after the engine was ready.

Triton compiles a kernel when it is first called with a new kind of arguments, and keeps the
result in a folder. The name of the folder contains everything that the result depends on: the
device, its driver, torch, Triton and the source of the kernels. A server whose image or volume
has the folder starts without compiling.
"""

import hashlib
import logging
import os
import shutil
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from headwater.native.folder import cache_folder

log = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/version")
_SOURCES = Path(__file__).parent.parent
_MAX_FOLDERS = 8
"""Number of folders of other devices, drivers and versions that are kept; older ones are
removed."""


def use_kernel_cache(device: torch.device) -> Path:
    """Let Triton keep kernels in a folder for this device and these versions.

    TRITON_CACHE_DIR takes precedence if the operator has set it. Call this before the first
    kernel is compiled.
    """
    named = os.environ.get("TRITON_CACHE_DIR")
    if named:
        return Path(named)
    folder = cache_folder() / "kernels" / kernel_key(device)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(OSError):
        os.utime(folder)
        _remove_old(folder.parent)
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    return folder


def kernel_key(device: torch.device) -> str:
    """The name of the device, and 16 digits of a hash of everything that compiled kernels
    depend on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else ()
    about = [name, str(capability), _driver(), torch.__version__, _version("triton")]
    digest = hashlib.sha256("\0".join(about).encode())
    for source in sorted(_SOURCES.rglob("*.py")):
        digest.update(source.read_bytes())
    word = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
    return f"{word}-{digest.hexdigest()[:16]}"


class CompilationCounter:
    """Counts kernels that Triton compiled, or loaded from its folder, in this process."""

    def __init__(self) -> None:
        self.num_before_ready = self.num_after_ready = 0
        self._is_ready = False
        self._before: Any = None

    def install(self) -> None:
        """Let Triton report to this object."""
        from triton import knobs

        self._before = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._note

    def mark_ready(self) -> None:
        """Log kernels that are compiled from now on: all that requests need should exist."""
        self._is_ready = True

    def _note(self, *args: Any, **details: Any) -> Any:  # noqa: ANN401 -- Triton's
        if self._is_ready:
            self.num_after_ready += 1
            log.warning(
                "a kernel was compiled or loaded after the engine was ready: kernel=%s",
                details.get("repr", "?"),
            )
        else:
            self.num_before_ready += 1
        return None if self._before is None else self._before(*args, **details)


def _remove_old(parent: Path) -> None:
    folders = sorted(parent.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders[_MAX_FOLDERS:]:
        shutil.rmtree(folder, ignore_errors=True)


def _driver() -> str:
    try:
        return _DRIVER.read_text(encoding="utf-8")
    except OSError:
        return "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"
