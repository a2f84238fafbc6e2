"""Streams that another instance continues: token by token, character by character."""

import json
from collections import defaultdict
from typing import Any

import pytest

from headwater.server.continuation import FIELD, HEADER, ContinuationMark, mark_line, take_mark
from headwater.server.router.stream_progress import StreamProgress
from tests.server.harness import error, run

FIELDS = {"prompt": "hello", "seed": 3, "max_tokens": 24, "stream": True}


def parsed(text):
    """Marks, and the events they belong to."""
    blocks = [block + "\n\n" for block in text.split("\n\n") if block]
    assert blocks.pop() == "data: [DONE]\n\n"
    pairs = [take_mark(block.encode()) for block in blocks]
    return [(mark, json.loads(event.removeprefix(b"data: "))) for mark, event in pairs]


def answers(events):
    """For each choice: its text, its ends, and its log-probabilities with offsets."""
    found: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"text": "", "ends": [], "logprobs": [], "opened": 0}
    )
    for event in events:
        for choice in event["choices"]:
            answer, part = found[choice["index"]], choice.get("delta") or choice
            answer["text"] += part.get("text") or part.get("content") or ""
            answer["opened"] += "role" in part
            answer["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            logprobs = choice.get("logprobs") or {}
            answer["logprobs"] += zip(
                *(
                    logprobs.get(name, [])
                    for name in ("tokens", "token_logprobs", "text_offset")
                ),
                strict=True,
            )
            answer["logprobs"] += logprobs.get("content", [])
    return dict(found)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"min_tokens": 9, "stop": ["q"]},
        {"n": 3, "stop": ["q", "Q"], "stream_options": {"include_usage": True}},
        {"logprobs": 2},
        {"logprobs": 2, "echo": True},
        {"prompt": ["hello", "world"], "n": 2},
        {"n": 2, "seed": None, "logprobs": 1},
        {"frequency_penalty": 1.0, "stream_options": {"include_usage": True}},
    ],
)
def test_a_response_continues_after_any_token(extra):
    """The rest is as if undisturbed, with half characters, stop strings, every choice,
    log-probabilities and usage; ended choices are not continued."""

    async def scenario(harness):
        body = FIELDS | extra
        whole = await harness.post("/v1/completions", body, headers={HEADER: "1"})
        raw = whole.text.encode().removesuffix(b"data: [DONE]\n\n")
        pieces = [piece + b"\n\n" for piece in raw.split(b"\n\n")[:-1]]
        events = [event for _, event in parsed(whole.text)]
        for place in range(1, len(pieces)):
            progress = StreamProgress()
            before = progress.strip(b"".join(pieces[:place]))
            assert b": headwater" not in before
            assert progress.can_continue
            if progress.is_whole:
                break
            again = await harness.post(
                "/v1/completions", json.loads(progress.body(encoded(body)))
            )
            rest = [event for _, event in parsed(again.text)]
            assert answers(events[:place] + rest) == answers(events)
            if "stream_options" in extra:
                for name in ("prompt_tokens", "completion_tokens"):
                    assert rest[-1]["usage"][name] == events[-1]["usage"][name]
        assert place >= 16

    run(scenario)


def encoded(body):
    return json.dumps(body).encode()


def test_a_chat_is_opened_once():
    """The instance that continues does not send the role again."""

    async def scenario(harness):
        fields = {"seed": 3, "stream": True}
        events = parsed((await harness.chat(**fields)).text)
        begun = [{"token_ids": [65, 66], "seed": 3}]
        again = await harness.chat(**fields, continue_choices=begun)
        rest = parsed(again.text)

        assert all(mark is None for mark, _ in events), "marks were not requested"
        assert events[0][1]["choices"][0]["delta"]["role"] == "assistant"
        assert all("role" not in event["choices"][0]["delta"] for _, event in rest)

    run(scenario)


def test_chats_with_several_choices_are_each_opened_once():
    """The continuing instance starts a choice that had no output yet."""

    async def scenario(harness):
        fields = {"seed": 3, "stream": True, "n": 2, "logprobs": True}
        events = [event for _, event in parsed((await harness.chat(**fields)).text)]
        first = answers(events)[0]
        ids = [entry["bytes"][0] for entry in first["logprobs"]]
        begun = [{"token_ids": ids, "seed": 3, "has_ended": True}, {}]
        again = await harness.chat(**fields, continue_choices=begun)
        rest = [event for _, event in parsed(again.text)]

        assert answers(rest) == {1: answers(events)[1]}
        assert answers(rest)[1]["opened"] == 1

    run(scenario)


def test_invalid_continuations_are_refused():
    """Refused continuations have too many or too few choices, invalid tokens, or too many of
    them."""

    async def scenario(harness):
        for entries in (
            [{"token_ids": [1] * 24, "seed": 3}],
            [{"token_ids": [1 << 30], "seed": 3}],
            [{"token_ids": [-1]}],
            [{"token_ids": [1]}, {}],
            [{"tokens": [1]}],
            [1],
        ):
            error(await harness.post("/v1/completions", FIELDS | {FIELD: entries}), 400)
        whole = FIELDS | {"stream": False, FIELD: [{"token_ids": [1]}]}
        error(await harness.post("/v1/completions", whole), 400)

    run(scenario)


def test_a_continuation_mark_is_a_comment_that_can_be_removed():
    """Clients ignore comments; a malformed mark is a ValueError."""
    mark = ContinuationMark(tokens=[1, 2], seed=9)

    assert take_mark(mark_line(mark) + b"data: {}\n\n") == (mark, b"data: {}\n\n")
    assert take_mark(b"data: {}\n\n") == (None, b"data: {}\n\n")
    with pytest.raises(ValueError, match="malformed"):
        take_mark(b": headwater {\ndata: {}\n\n")
