"""Block identity: fixed encoding, separate namespaces, media, bad input."""

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache import KeyScheme, MediaSpan, Namespace, TokenPath, media_by_block
from headwater.errors import CacheUseError

SCHEME = KeyScheme(block_tokens=4, fingerprint=b"weights", kv_format="fp16/1", shard="0/1")


def chain(scheme, tokens, media=None):
    return scheme.chain(scheme.root(Namespace()), TokenPath(tokens).view, media)


def test_encoding_is_fixed():
    """Lesson 42: keys have a documented binary encoding, which must never change silently."""
    fields = (
        b"f" + struct.pack("<I", 7) + b"weights"
        + b"k" + struct.pack("<I", 6) + b"fp16/1"
        + b"b" + struct.pack("<I", 4) + struct.pack("<I", 4)
        + b"p" + struct.pack("<I", 3) + b"0/1"
        + b"a" + struct.pack("<I", 0)
        + b"s" + struct.pack("<I", 0)
    )  # fmt: skip
    root = hashlib.sha256(b"headwater/block-key/1" + fields).digest()
    first = hashlib.sha256(root + struct.pack("<4i", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4i", 5, 6, 7, 8)).digest()

    assert chain(SCHEME, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == [first, second]


@pytest.mark.parametrize(
    "other",
    [
        KeyScheme(block_tokens=4, fingerprint=b"other", kv_format="fp16/1", shard="0/1"),
        KeyScheme(block_tokens=4, fingerprint=b"weights", kv_format="fp32/1", shard="0/1"),
        KeyScheme(block_tokens=4, fingerprint=b"weights", kv_format="fp16/1", shard="1/2"),
        KeyScheme(block_tokens=2, fingerprint=b"weights", kv_format="fp16/1", shard="0/1"),
    ],
)
def test_deployments_that_differ_share_no_key(other):
    """Lesson 39: model, dtype, layout, shard and block size are all part of a key."""
    tokens = list(range(8))

    assert not set(chain(SCHEME, tokens)) & set(chain(other, tokens))


def test_salt_and_adapter_cannot_be_confused():
    """Lesson 67: fields are tagged and length-prefixed, so no two namespaces collide."""
    names = [("ab", ""), ("a", "b"), ("", "ab"), ("b", "a"), ("", ""), ("a\x00", "b")]
    roots = {SCHEME.root(Namespace(salt, adapter)) for salt, adapter in names}

    assert len(roots) == len(names)


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(0, 7))
def test_a_key_stands_for_everything_before_it(tokens, changed):
    """Changing one token changes the key of its block and of all later blocks, and no earlier
    key."""
    other = list(tokens)
    other[changed] += 10
    same = [a == b for a, b in zip(chain(SCHEME, tokens), chain(SCHEME, other), strict=True)]

    assert same == [changed >= 4, False]


def test_media_are_part_of_identity():
    """The same placeholder tokens with another image are another block."""
    tokens = [9] * 8
    one = media_by_block([MediaSpan(4, 6, b"cat")], 4)
    two = media_by_block([MediaSpan(4, 6, b"dog")], 4)

    assert chain(SCHEME, tokens, media=one)[0] == chain(SCHEME, tokens, media=two)[0]
    assert chain(SCHEME, tokens, media=one)[1] != chain(SCHEME, tokens, media=two)[1]


def test_media_positions_count():
    """An image one token later gives another block; a long image is part of every block it
    touches."""
    assert media_by_block([MediaSpan(3, 9, b"x")], 4).keys() == {0, 1, 2}
    assert media_by_block([MediaSpan(0, 2, b"x")], 4) != media_by_block(
        [MediaSpan(1, 3, b"x")], 4
    )
    with pytest.raises(CacheUseError):
        media_by_block([MediaSpan(3, 3, b"x")], 4)


@pytest.mark.parametrize(
    "tokens",
    [
        [2**31],
        [-(2**31) - 1],
        [2**70],
        np.array([2**31]),
        np.array([1.5]),
        ["a"],
        np.zeros((2, 2)),
    ],
)
def test_tokens_that_are_not_int32_are_refused(tokens):
    """Bad token ids raise a typed error instead of wrapping round."""
    with pytest.raises(CacheUseError):
        TokenPath(tokens)


def test_int32_arrays_are_not_copied():
    """The tokenizer's array is used as it is."""
    tokens = np.arange(8, dtype=np.int32)

    assert TokenPath(tokens).tokens is tokens
    assert TokenPath(tokens.astype(np.int64)).tokens.dtype == np.int32
    assert TokenPath(np.arange(16, dtype=np.int32)[::2]).tokens.tolist() == list(
        range(0, 16, 2)
    )
    assert TokenPath([]).num_blocks(4) == 0
