"""Text from arriving tokens: complete characters only, and stop strings at any position."""

import functools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from headwater.engine.detokenizer import Detokenizer, StopFilter, TextStream
from headwater.engine.tokenizer import Tokenizer
from headwater.scheduler.request import SequenceOutput
from headwater.testing.engines import make_tokenizer_folder
from headwater.types import RequestId


@functools.cache
def byte_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer(make_tokenizer_folder(Path(folder)))


WORDS = ["▁", "▁the", "▁a", "cat", "s", "é", "▁€", "日", "▁▁▁", "\n", ",", "'t"]


@functools.cache
def fallback_tokenizer(strips: bool) -> Tokenizer:
    """A tokenizer of words with one token per byte, as in Gemma; with `strips` as in Llama 2,
    Mistral and Phi-3."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    fast = FastTokenizer(
        models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    fast.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    with tempfile.TemporaryDirectory() as folder:
        fast.save(f"{folder}/tokenizer.json")
        return Tokenizer(folder)


def make_output(tokens, finish_reason=None, stop_token=None):
    return SequenceOutput(
        request_id=RequestId("r"),
        tokens=list(tokens),
        logprobs=[None] * len(tokens),
        finish_reason=finish_reason,
        stop_token=stop_token,
    )


@given(text=st.text(max_size=80))
def test_pieces_are_whole_characters_and_join_to_the_text(text):
    """No piece ever contains half a character, and nothing is lost or repeated."""
    tokens = byte_tokenizer().encode(text, add_special_tokens=False).tolist()
    detokenizer = Detokenizer(byte_tokenizer())

    pieces = [detokenizer.push([token]) for token in tokens]

    assert "".join(pieces) + detokenizer.flush() == byte_tokenizer().decode(tokens)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(raw=st.binary(max_size=120), prompt=st.binary(max_size=20), data=st.data())
def test_any_bytes_join_to_what_decoding_at_once_gives(raw, prompt, data):
    """Broken bytes are shown as broken, once each, however the tokens are grouped."""
    tokens, before = list(raw), list(prompt)
    detokenizer = Detokenizer(byte_tokenizer(), prompt=before)
    pieces = []
    while tokens:
        count = data.draw(st.integers(1, 5))
        pieces.append(detokenizer.push(tokens[:count]))
        tokens = tokens[count:]

    joined = "".join(pieces) + detokenizer.flush()

    whole = bytes(before + list(raw)).decode(errors="replace")
    assert whole.endswith(joined)
    # Text missing at the front is the prompt's own text, without its unfinished end.
    assert bytes(before).decode(errors="replace").startswith(whole[: len(whole) - len(joined)])


@pytest.mark.parametrize("strips", [False, True])
@given(
    parts=st.lists(st.sampled_from(WORDS) | st.text(max_size=3) | st.binary(max_size=4)),
    data=st.data(),
)
def test_bytes_that_stand_in_for_characters_join_to_the_text(strips, parts, data):
    """Decoders drop a whole run of byte tokens because of one unfinished character. Here
    complete characters are shown, and only the broken bytes are replaced."""
    tokens: list[int] = []
    raw = b""
    for part in parts:
        is_word = part in WORDS
        new = part.replace("▁", " ") if is_word else part
        new = new if isinstance(new, bytes) else new.encode()
        tokens += [257 + WORDS.index(part)] if is_word else [1 + byte for byte in new]
        raw += new
    letter = 1 + ord("a")  # at the beginning, so that no leading space is stripped
    detokenizer = Detokenizer(fallback_tokenizer(strips), prompt=[letter])
    pieces = []
    while tokens:
        count = data.draw(st.integers(1, 5))
        pieces.append(detokenizer.push(tokens[:count]))
        tokens = tokens[count:]

    pieces.append(detokenizer.flush())

    assert "".join(pieces) == raw.decode(errors="replace")


@pytest.mark.parametrize("text", ["😀😀", "𠜎𠜱𠝹 the", "😀é😀", "a😀" * 30])
def test_characters_of_bytes_never_show_in_halves(text):
    """No half character is shown with many characters in a row, longer than the window, and
    after a prompt of the same kind."""
    tokens = [1 + byte for byte in text.encode()]
    detokenizer = Detokenizer(fallback_tokenizer(True), prompt=tokens)

    pieces = [detokenizer.push([token]) for token in tokens]

    assert "".join(pieces) == text
    assert all(piece in ("", *text) for piece in pieces)


def test_a_split_character_is_held_back():
    """The three tokens of a euro sign show nothing, nothing, and then the sign."""
    detokenizer = Detokenizer(byte_tokenizer())

    assert [detokenizer.push([byte]) for byte in "€a".encode()] == ["", "", "€", "a"]


def test_a_character_that_never_ends_is_shown_at_the_end():
    """Text that ends inside a character ends with a replacement sign."""
    detokenizer = Detokenizer(byte_tokenizer())

    assert detokenizer.push([0xE2, 0x82]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_token_costs_the_same_however_long_the_text_is():
    """The window that is decoded for each token is bounded."""
    detokenizer = Detokenizer(byte_tokenizer())

    for _ in range(2000):
        detokenizer.push([0xF4])  # never a whole character

    assert len(detokenizer._window) <= 32


@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    data=st.data(),
)
def test_stop_strings_are_found_wherever_pieces_end(text, stops, include, data):
    """The shown text is the same as with a check after each character."""
    found = StopFilter(stops, include_stop=include)
    shown, stop, rest = "", None, text
    while rest and stop is None:
        count = data.draw(st.integers(1, 6))
        piece, stop = found.push(rest[:count])
        shown, rest = shown + piece, rest[count:]
    if stop is None:
        shown += found.flush()

    assert (shown, stop is None) == expected(text, stops, include)


def expected(text, stops, include):
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            cut = max(len(stop) for stop in ended)
            return (text[:end] if include else text[: end - cut]), False
    return text, True


def test_text_that_may_begin_a_stop_string_is_held_back():
    """A client never sees the beginning of a stop string that then completes."""
    found = StopFilter(["<end>"])

    assert found.push("a <e") == ("a ", None)
    assert found.push("x") == ("<ex", None)
    assert found.push("<end") == ("", None)
    assert found.push("> more") == ("", "<end>")


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abSTOP")])
def test_a_stop_string_ends_the_text(include, text):
    """The finish reason is `stop`, and the string itself is shown only when asked for."""
    stream = TextStream(byte_tokenizer(), stops=["STOP"], include_stop=include)

    pieces = [stream.append_output(make_output([byte])) for byte in b"abSTOP"]

    assert "".join(piece.text for piece in pieces) == text
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == ("stop", "STOP")
    assert stream.num_tokens == 6


def test_stop_strings_wait_for_min_tokens():
    """A stop string within the first `min_tokens` tokens is text like any other."""
    stream = TextStream(byte_tokenizer(), stops=["a"], min_tokens=3)

    pieces = [stream.append_output(make_output([byte])) for byte in b"aaxa"]

    assert [piece.finish_reason for piece in pieces] == [None, None, None, "stop"]
    assert "".join(piece.text for piece in pieces) == "aax"


@given(
    text=st.text(alphabet="abcé", min_size=1, max_size=16),
    stops=st.lists(st.text(alphabet="abcé", min_size=1, max_size=3), max_size=2),
    include=st.booleans(),
    min_tokens=st.integers(0, 12),
    data=st.data(),
)
def test_joined_steps_end_where_single_steps_do(text, stops, include, min_tokens, data):
    """A slow reader gets several steps in one output. Text, tokens and reason are the same: no
    token after a stop string counts, and no stop string within `min_tokens` ends the text."""
    tokens = byte_tokenizer().encode(text, add_special_tokens=False).tolist()

    def streamed(sizes):
        stream = TextStream(
            byte_tokenizer(), stops=stops, include_stop=include, min_tokens=min_tokens
        )
        kept: list[int] = []
        shown, rest = "", tokens
        for size in sizes:
            part, rest = rest[:size], rest[size:]
            piece = stream.append_output(make_output(part, None if rest else "length"))
            shown, kept = shown + piece.text, kept + part[: piece.num_tokens]
            if piece.finish_reason is not None:
                assert stream.num_tokens == len(kept)
                return shown, kept, piece.finish_reason, piece.stop_reason
        raise AssertionError("the text has an end")

    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(tokens), max_size=len(tokens)))
    assert streamed(sizes) == streamed([1] * len(tokens))


def test_a_stop_token_is_no_part_of_the_text():
    """A token that stops is named as the reason, and its text is left out."""
    stream = TextStream(byte_tokenizer())

    piece = stream.append_output(make_output(b"ab!", "stop", stop_token=ord("!")))

    assert piece == ("ab", "stop", ord("!"), 3)


def test_text_that_was_held_back_is_sent_at_the_end():
    """Neither half a character nor half a stop string is lost when the output ends."""
    stream = TextStream(byte_tokenizer(), stops=["abc"])

    assert stream.append_output(make_output(b"xab")).text == "x"
    assert stream.append_output(make_output(b"\xe2", "length")) == (
        "ab\ufffd",
        "length",
        None,
        1,
    )
