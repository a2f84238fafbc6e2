"""Loads the native form of `headwater.cache.pool.SlotPool`.

It is an extension module, because a call by ctypes costs as much as the numpy calls that it
replaces. Without a compiler, or without the header files of Python, the pool stays in Python.
"""

import importlib.util
import logging
import subprocess
import sysconfig
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import numpy as np

from headwater.native.compiler import compile_library

_SOURCE = Path(__file__).with_name("slot_pool.c")

_log = logging.getLogger(__name__)


def prepare() -> bool:
    """Compile and load the native form; return whether it is used from now on. The first call
    on a machine takes about two seconds, so call it at start and never on the engine loop."""
    return _native() is not None


def pool_type() -> type | None:
    """The native type, if it was prepared."""
    return _native() if _native.cache_info().currsize else None


@cache
def _native() -> type | None:
    try:
        library = compile_library(_SOURCE, _flags())
        loader = ExtensionFileLoader("slot_pool", str(library))
        spec = importlib.util.spec_from_file_location("slot_pool", library, loader=loader)
        if spec is None:
            raise ImportError(f"{library} is not an extension module")
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module.Pool  # type: ignore[no-any-return]  # the module has no types
    except (OSError, ImportError, subprocess.SubprocessError) as exc:
        _log.warning("slots are counted in Python, which is slower: %s", exc)
        return None


def _flags() -> tuple[str, ...]:
    """Flags of the compiler. They name the versions of Python and numpy, so that each pair of
    versions gets its own library."""
    abi = f"{sysconfig.get_config_var('SOABI')} {np.__version__}"
    headers = (sysconfig.get_path("include"), sysconfig.get_path("platinclude"))
    folders = dict.fromkeys((*headers, np.get_include()))
    return ("-O2", f'-DABI="{abi}"', *(f"-I{folder}" for folder in folders))
