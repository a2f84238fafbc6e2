"""Block keys: native code and Python give the same bytes."""

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.native import block_keys


@pytest.fixture(scope="module")
def prepared() -> None:
    if not block_keys.prepare():
        pytest.skip("there is no C compiler or no shared OpenSSL")


@given(
    parent=st.binary(min_size=32, max_size=32),
    blocks=st.integers(0, 40),
    tail=st.integers(0, 15),
    stride=st.sampled_from([16, 64, 256]),
    seed=st.integers(0, 255),
)
def test_native_keys_are_those_of_hashlib(prepared, parent, blocks, tail, stride, seed):
    """For any length, each key is SHA-256 of the key before and the block's tokens."""
    tokens = bytes((seed + i) % 256 for i in range(blocks * stride + tail % stride))

    expected, key = [], parent
    for at in range(0, blocks * stride, stride):
        key = hashlib.sha256(key + tokens[at : at + stride]).digest()
        expected.append(key)

    assert block_keys.chain(parent, memoryview(tokens), stride) == expected


def test_without_a_compiler_keys_are_hashed_in_python(tmp_path):
    """The keys are the same, and a warning says what is slower."""
    script = (
        "from headwater.native import block_keys as k\n"
        "assert not k.prepare()\n"
        "print(k.chain(bytes(32), bytes(64 * 8), 64)[-1].hex())\n"
    )
    env = {**os.environ, "CC": "/nonexistent/cc", "HEADWATER_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, check=True, capture_output=True, text=True
    )

    assert done.stdout.strip() == block_keys.chain(bytes(32), bytes(64 * 8), 64)[-1].hex()
    assert "hashed in Python" in done.stderr
