"""Hashes all blocks of a prompt in one native call, without the interpreter lock.

In Python one block costs two calls and 0.5 µs with the lock held: for 128 k tokens in blocks of
16, all other threads would wait for milliseconds. `prepare` compiles and loads the native form once, at
start; without a compiler or OpenSSL the same keys are computed by `hashlib`.
"""

import ctypes
import hashlib
import logging
import subprocess
from functools import cache
from pathlib import Path
from typing import Protocol

from headwater.native.compiler import compile_library

KEY_BYTES = 32

_SOURCE = Path(__file__).with_name("block_keys.c")
_FLAGS = ("-O2", "-std=c11")
_FEWEST_BLOCKS = 4
"""For fewer blocks the native call costs more than it saves."""

_log = logging.getLogger(__name__)


class _Chain(Protocol):
    def __call__(
        self, parent: bytes, tokens: bytes | memoryview, count: int, stride: int
    ) -> list[bytes]: ...


def prepare() -> bool:
    """Compile and load the native form; return whether it is used from now on. The first call
    on a machine takes up to a second, so call it at start and never on the engine loop."""
    return _native() is not None


def chain(parent: bytes, tokens: bytes | memoryview, stride: int) -> list[bytes]:
    """Keys of the full blocks of `stride` bytes in `tokens`, each chained to the one before."""
    count = len(tokens) // stride
    if count < _FEWEST_BLOCKS or not _native.cache_info().currsize:
        return _in_python(parent, tokens, count, stride)
    return (_native() or _in_python)(parent, tokens, count, stride)


def next_key(parent: bytes, block: bytes) -> bytes:
    """The key of one block, chained to `parent`."""
    return hashlib.sha256(parent + block).digest()


def _in_python(
    parent: bytes, tokens: bytes | memoryview, count: int, stride: int
) -> list[bytes]:
    keys: list[bytes] = []
    key = parent
    for at in range(0, count * stride, stride):
        key = hashlib.sha256(b"".join((key, tokens[at : at + stride]))).digest()
        keys.append(key)
    return keys


@cache
def _native() -> _Chain | None:
    try:
        library = ctypes.CDLL(str(compile_library(_SOURCE, _FLAGS)))
        hashes = _openssl()
    except (OSError, AttributeError, ImportError, subprocess.SubprocessError) as exc:
        _log.warning("block keys are hashed in Python, which is slower: %s", exc)
        return None
    function = library.chain_keys
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = (*[pointer] * 3, ctypes.c_char_p, pointer, integer, integer, pointer)
    function.restype = integer

    def chain_native(
        parent: bytes, tokens: bytes | memoryview, count: int, stride: int
    ) -> list[bytes]:
        held = bytes(tokens[: count * stride])
        out = ctypes.create_string_buffer(count * KEY_BYTES)
        if function(*hashes, parent, held, count, stride, out) != count:
            return _in_python(parent, tokens, count, stride)
        raw = out.raw
        return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]

    return chain_native


def _openssl() -> tuple[ctypes.c_void_p, ...]:
    """SHA-256 functions of the OpenSSL that Python itself is linked with: a symbol lookup in
    `_hashlib` also searches the libraries that `_hashlib` depends on."""
    import _hashlib

    library = ctypes.CDLL(_hashlib.__file__)
    names = ("SHA256_Init", "SHA256_Update", "SHA256_Final")
    return tuple(ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in names)
