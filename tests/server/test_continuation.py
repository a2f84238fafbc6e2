"""Streams that are taken up by another instance: token by token, character by character."""

import json

import pytest

from headwater.server.continuation import HEADER, Mark, mark_line, take_mark
from tests.server.rig import error, run

FIELDS = {"prompt": "hello", "seed": 3, "max_tokens": 24, "stream": True}


def parsed(text):
    """Marks, and the events they belong to."""
    blocks = [block + "\n\n" for block in text.split("\n\n") if block]
    assert blocks.pop() == "data: [DONE]\n\n"
    pairs = [take_mark(block.encode()) for block in blocks]
    return [(mark, json.loads(event.removeprefix(b"data: "))) for mark, event in pairs]


def said(events):
    return "".join(event["choices"][0]["text"] for event in events if event["choices"])


@pytest.mark.parametrize(
    "extra", [{}, {"min_tokens": 9, "stop": ["q"]}, {"stream_options": {"include_usage": True}}]
)
def test_an_answer_goes_on_after_any_token(extra):
    """The rest is what it would have been: half characters, stop strings and usage included."""

    async def scenario(rig):
        body = FIELDS | extra
        whole = await rig.post("/v1/completions", body, headers={HEADER: "1"})
        events = parsed(whole.text)
        tokens: list[int] = []
        marked = [mark for mark, _ in events if mark is not None]
        assert [mark.seed for mark in marked] == [3] * len(marked)
        for place, mark in enumerate(marked[:-1]):
            tokens += mark.tokens
            before = said(event for _, event in events[: place + 1])
            again = await rig.post(
                "/v1/completions", body | {"continue_token_ids": list(tokens)}
            )
            rest = [event for _, event in parsed(again.text)]
            assert before + said(rest) == said(event for _, event in events)
            assert not mark.has_ended
            if "stream_options" in extra:
                usage = [event["usage"] for _, event in events][-1]
                assert rest[-1]["usage"]["completion_tokens"] == usage["completion_tokens"]
                assert rest[-1]["usage"]["prompt_tokens"] == usage["prompt_tokens"]
        assert marked[-1].has_ended

    run(scenario)


def test_a_chat_is_opened_once():
    """Who goes on does not say again who speaks."""

    async def scenario(rig):
        fields = {"seed": 3, "stream": True}
        events = parsed((await rig.chat(**fields)).text)
        again = await rig.chat(**fields, continue_token_ids=[65, 66])
        rest = parsed(again.text)

        assert all(mark is None for mark, _ in events), "nobody asked for marks"
        assert events[0][1]["choices"][0]["delta"]["role"] == "assistant"
        assert all("role" not in event["choices"][0]["delta"] for _, event in rest)

    run(scenario)


def test_what_cannot_be_continued_is_not_marked():
    """An answer whose rest depends on more than its tokens; and is refused if it is asked for."""

    async def scenario(rig):
        for extra in ({"n": 2}, {"logprobs": 1}, {"frequency_penalty": 1.0}):
            answer = await rig.post("/v1/completions", FIELDS | extra, headers={HEADER: "1"})
            assert ": headwater" not in answer.text
            taken_up = FIELDS | extra | {"continue_token_ids": [1]}
            error(await rig.post("/v1/completions", taken_up), 400)
        for ids in ([1] * 24, [1 << 30], [-1]):
            wrong = FIELDS | {"continue_token_ids": ids}
            error(await rig.post("/v1/completions", wrong), 400)

    run(scenario)


def test_a_mark_is_a_comment_that_can_be_taken_out():
    """Clients that know nothing of it would ignore it; nonsense is a ValueError."""
    mark = Mark(tokens=[1, 2], seed=9)

    assert take_mark(mark_line(mark) + b"data: {}\n\n") == (mark, b"data: {}\n\n")
    assert take_mark(b"data: {}\n\n") == (None, b"data: {}\n\n")
    with pytest.raises(ValueError, match="cannot be read"):
        take_mark(b": headwater {\ndata: {}\n\n")
