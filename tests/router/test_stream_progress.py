"""The part of an answer that a client has, wherever and however often a stream breaks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.server.continuation import (
    FAILED,
    FIELD,
    PART,
    RETURNED,
    ContinuationMark,
    mark_line,
)
from headwater.server.router.stream_progress import (
    EventSplitter,
    InstanceFailed,
    InstanceFull,
    StreamProgress,
)
from tests.search import search

SEED = 7


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"text": text}).encode() + b"\n\n"


@st.composite
def answers(draw):
    """The tokens of some choices, and the order in which an instance sends them."""
    tokens = draw(st.lists(st.lists(st.integers(0, 99), min_size=1), min_size=1, max_size=3))
    turns = [index for index, sent in enumerate(tokens) for _ in sent]
    return tokens, draw(st.permutations(turns))


def stream_of_instance(tokens: list[list[int]], turns: list[int], known: list[int]) -> bytes:
    """A stream that continues after the first `known` tokens of each choice."""
    places, parts = list(known), []
    left = [len(sent) - at for sent, at in zip(tokens, known, strict=True)]
    for index in turns:
        if left[index]:
            left[index] -= 1
            token, at = tokens[index][places[index]], places[index]
            places[index] += 1
            mark = ContinuationMark(
                tokens=[token],
                seed=SEED,
                index=index,
                num_choices=len(tokens),
                has_ended=at == len(tokens[index]) - 1,
            )
            parts.append(mark_line(mark) + event(f"{index}:{token}"))
    return b"".join(parts) + b"data: [DONE]\n\n"


@search(examples=150)
@given(answers(), st.lists(st.integers(0, 2000), max_size=5), st.integers(1, 90))
def test_however_often_a_stream_breaks_its_client_has_every_token_once(answer, breaks, size):
    """Events come in pieces of any size; each next instance gets what the client has."""
    tokens, turns = answer
    progress, got, known = StreamProgress(), b"", [0] * len(tokens)
    for cut in [*breaks, None]:
        stream = stream_of_instance(tokens, turns, known)[:cut]
        splitter = EventSplitter()
        for at in range(0, len(stream), size):
            if whole := splitter.feed(stream[at : at + size]):
                got += progress.strip(whole)
        if got.endswith(b"data: [DONE]\n\n") or progress.is_whole:
            break
        body = json.loads(progress.body(b'{"prompt":"x"}'))
        for index, told in enumerate(body.get(FIELD, ())):
            known[index] = len(told["token_ids"])
            assert told["token_ids"] == tokens[index][: known[index]]
            assert told["seed"] == (SEED if known[index] else None)
            assert told["has_ended"] == (known[index] == len(tokens[index]))

    assert progress.is_whole
    events = got.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]
    heard = [json.loads(e.removeprefix(b"data: "))["text"] for e in events]
    for index, sent in enumerate(tokens):
        assert [t for t in heard if t.startswith(f"{index}:")] == [f"{index}:{t}" for t in sent]


@pytest.mark.parametrize(
    ("mark", "error"), [(FAILED, InstanceFailed), (RETURNED, InstanceFull)]
)
def test_the_last_piece_of_a_failed_instance_is_dropped(mark, error):
    """Output in that piece is dropped and generated again by the next instance."""
    progress = StreamProgress()
    progress.strip(mark_line(ContinuationMark(tokens=[1], seed=SEED)) + event("a"))
    last = (
        mark_line(ContinuationMark(tokens=[2], seed=SEED))
        + event("b")
        + mark_line(mark)
        + event("no")
    )

    with pytest.raises(error):
        progress.strip(last)

    assert progress.num_tokens == 1
    assert json.loads(progress.body(b"{}"))[FIELD][0]["token_ids"] == [1]


@pytest.mark.parametrize("index", [-1, 1])
def test_an_unknown_choice_index_raises(index):
    """A broken instance is abandoned, not trusted."""
    with pytest.raises(ValueError, match="of choice"):
        StreamProgress().strip(
            mark_line(ContinuationMark(tokens=[1], index=index)) + event("a")
        )


def test_tokens_that_the_client_sent_are_kept():
    """The client may have received the beginning of its answer in an earlier request."""
    progress = StreamProgress()
    progress.strip(mark_line(ContinuationMark(tokens=[3], seed=SEED)) + event("c"))
    asked = {"prompt": "x", FIELD: [{"token_ids": [1, 2], "seed": SEED}]}

    (told,) = json.loads(progress.body(json.dumps(asked).encode()))[FIELD]

    assert told["token_ids"] == [1, 2, 3]


def test_an_event_without_tokens_is_sent_with_the_next_one_that_has_some():
    """A role chunk waits for the first token; if that never comes, neither does the chunk."""
    opening = event("role")
    part = mark_line(PART) + opening
    progress = StreamProgress()

    assert progress.strip(part) == b""
    assert progress.body(b"{}") == b"{}"
    assert progress.strip(part) == b""
    marked = mark_line(ContinuationMark(tokens=[3], seed=SEED)) + event("c")
    assert progress.strip(marked) == opening + event("c")
    assert progress.can_continue


def test_tokens_that_show_nothing_are_known_too():
    """A mark alone counts its tokens, and the client sees nothing of it."""
    progress = StreamProgress()
    alone = mark_line(ContinuationMark(tokens=[3, 4], seed=SEED)) + b"\n"

    assert progress.strip(alone) == b""
    assert progress.can_continue
    assert json.loads(progress.body(b"{}"))[FIELD][0]["token_ids"] == [3, 4]


def test_a_stream_cannot_continue_after_an_event_without_tokens():
    """After such an event a broken stream can only be ended."""
    progress = StreamProgress()
    progress.strip(mark_line(ContinuationMark(tokens=[3], seed=SEED)) + event("c") + event("d"))

    assert not progress.can_continue
