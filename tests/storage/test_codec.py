"""A block proves its identity: any accidental change of its bytes is detected before they are
used."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import ConfigError, StorageCorrupt
from headwater.storage.codec import (
    HEADER_BYTES,
    BlockFormat,
    checksum,
    decode_header,
    encode_header,
    verify_block,
)
from headwater.testing.storage import make_block, make_format, make_keys

KEY, PARENT = make_keys(2)
SIZES = st.sampled_from([1, 7, 4095, 4096, 4097, 12_288, 40_001])


def make_value(block_bytes: int = 12_288) -> tuple[BlockFormat, bytearray, bytearray]:
    form = make_format(block_bytes=block_bytes)
    payload = bytearray(make_block(KEY, block_bytes))
    header = bytearray(encode_header(form, KEY, PARENT, memoryview(payload)))
    return form, header, payload


@given(payload=st.binary(min_size=1, max_size=20_000))
def test_a_block_verifies_itself(payload: bytes) -> None:
    """What was encoded decodes to the same, and verifies (lesson 42: fixed, binary, versioned)."""
    form = make_format(block_bytes=len(payload))
    raw = encode_header(form, KEY, PARENT, memoryview(payload))

    verify_block(raw, memoryview(payload), form=form, key=KEY)
    header = decode_header(raw)
    assert len(raw) == HEADER_BYTES
    assert (header.key, header.parent) == (KEY, PARENT)
    assert (header.fingerprint, header.payload_bytes) == (form.fingerprint, len(payload))


@given(data=st.data(), block_bytes=SIZES)
def test_one_to_three_flipped_bits_are_always_found(
    data: st.DataObject, block_bytes: int
) -> None:
    """Flipped bits in the payload are found at any positions (lesson 44)."""
    form, header, payload = make_value(block_bytes)
    bits = data.draw(
        st.sets(st.integers(0, 8 * block_bytes - 1), min_size=1, max_size=3), label="bits"
    )
    for bit in bits:
        payload[bit // 8] ^= 1 << bit % 8

    with pytest.raises(StorageCorrupt) as caught:
        verify_block(header, memoryview(payload), form=form, key=KEY)
    assert caught.value.reason == "bad_checksum"


@given(bit=st.integers(0, 8 * 152 - 1))
def test_a_flipped_bit_in_the_header_is_found(bit: int) -> None:
    """Every field of the header is verified (lesson 44)."""
    form, header, payload = make_value()
    header[bit // 8] ^= 1 << bit % 8

    with pytest.raises(StorageCorrupt):
        verify_block(header, memoryview(payload), form=form, key=KEY)


@given(data=st.data())
def test_moved_bytes_change_the_checksum(data: st.DataObject) -> None:
    """Sectors that were swapped or overwritten are detected."""
    sector = 512
    payload = bytearray(make_block(KEY, 64 * sector))
    before = checksum(payload)
    first, second = data.draw(
        st.lists(st.integers(0, 63), min_size=2, max_size=2, unique=True), label="sectors"
    )
    a, b = (slice(at * sector, (at + 1) * sector) for at in (first, second))
    if data.draw(st.booleans(), label="swap"):
        payload[a], payload[b] = payload[b], payload[a]
    else:
        payload[a] = bytes(sector)

    assert checksum(payload) != before


@given(size=st.integers(0, 12_287))
def test_a_truncated_block_is_found(size: int) -> None:
    """A shorter payload, or one whose end is zeros, is not the block (lesson 44)."""
    form, header, payload = make_value()
    with pytest.raises(StorageCorrupt) as caught:
        verify_block(header, memoryview(payload)[:size], form=form, key=KEY)
    assert caught.value.reason == "bad_length"

    payload[size:] = bytes(len(payload) - size)
    with pytest.raises(StorageCorrupt):
        verify_block(header, memoryview(payload), form=form, key=KEY)


def test_another_block_and_another_model_are_found() -> None:
    """A whole block under the wrong key, or of the wrong model, is not used (lesson 39)."""
    form, header, payload = make_value()
    with pytest.raises(StorageCorrupt) as caught:
        verify_block(header, memoryview(payload), form=form, key=PARENT)
    assert caught.value.reason == "other_key"

    other = make_format("another model", block_bytes=len(payload))
    with pytest.raises(StorageCorrupt) as caught:
        verify_block(header, memoryview(payload), form=other, key=KEY)
    assert caught.value.reason == "other_model"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "truncated"),
        (bytes(HEADER_BYTES), "no_header"),
        (b"x" * HEADER_BYTES, "no_header"),
    ],
)
def test_bytes_that_are_not_a_header_are_named_as_such(raw: bytes, reason: str) -> None:
    """Empty space and foreign bytes are distinguished from damage."""
    with pytest.raises(StorageCorrupt) as caught:
        decode_header(raw)
    assert caught.value.reason == reason


def test_a_later_version_is_not_guessed_at() -> None:
    """A block of an unknown format version is a miss (lesson 42)."""
    _, header, _ = make_value()
    header[8] = 2

    with pytest.raises(StorageCorrupt) as caught:
        decode_header(header)
    assert caught.value.reason == "other_version"


def test_the_checksum_is_fixed() -> None:
    """Stores outlive programs: these bytes must not change without a new version."""
    assert checksum(bytes(range(256)) * 33).hex() == "2fd443cb363b5f1f2ccfec3e2e288ace"


def test_a_format_needs_a_fingerprint_and_a_size() -> None:
    """Mistakes in a format are found when it is made."""
    with pytest.raises(ConfigError, match="32 bytes"):
        BlockFormat(fingerprint=b"short", block_bytes=1)
    with pytest.raises(ConfigError, match="positive"):
        BlockFormat(fingerprint=bytes(32), block_bytes=0)
