"""Compiles a C source file of the package into a shared library, once per machine and source.

The library is kept in the user's cache folder. Its name is a hash of the source, the compiler,
the flags and the processor, so a changed source is compiled again and an old library is never
loaded by mistake.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from headwater.native.folder import cache_folder

_log = logging.getLogger(__name__)

_COMPILE_S = 60.0


def open_library(source: Path, flags: Sequence[str], otherwise: str) -> ctypes.CDLL | None:
    """The loaded library; compiled now if necessary. None if that fails, with a warning that says
    what happens `otherwise`."""
    try:
        return ctypes.CDLL(str(compile_library(source, flags)))
    except (OSError, subprocess.SubprocessError) as exc:
        _log.warning("%s: %s", otherwise, exc)
        return None


def compile_library(source: Path, flags: Sequence[str]) -> Path:
    """Path of the compiled library; compiles it when it is not in the cache folder.

    Raises OSError or subprocess.SubprocessError when there is no compiler or it fails.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler (cc)")
    about = (source.read_text(encoding="utf-8"), compiler, *flags, _processor())
    name = hashlib.sha256("\0".join(about).encode()).hexdigest()[:16]
    target = cache_folder() / "native" / f"{source.stem}-{name}.so"
    if not target.is_file():
        _compile(compiler, source, flags, target)
    return target


def _compile(compiler: str, source: Path, flags: Sequence[str], target: Path) -> None:
    """Compile beside `target`, then rename: two processes may do so at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "library.so"
        command = [compiler, *flags, "-shared", "-fPIC", str(source), "-o", str(made), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_S)
        made.replace(target)


def _processor() -> str:
    """A description of the processor, on which the result of `-march=native` depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    kinds = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
