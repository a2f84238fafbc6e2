"""The offline engine: prompts in, texts out, nothing left running."""

import io

import numpy as np
import pytest

from headwater.clock import SystemClock
from headwater.engine.llm import OfflineEngine
from headwater.engine.progress import LineProgress, show_progress
from headwater.engine.tokenizer import Tokenizer
from headwater.errors import PromptTooLong, RequestError
from headwater.scheduler.request import SamplingParams
from headwater.testing.engines import VOCAB_SIZE, make_echo_core, make_tokenizer_folder


@pytest.fixture
def llm(tmp_path):
    core = make_echo_core()
    tokenizer = Tokenizer(make_tokenizer_folder(tmp_path))
    yield OfflineEngine(core, tokenizer, SystemClock(), vocab_size=VOCAB_SIZE)
    assert not core.has_work
    core.check()


def test_answers_come_in_the_order_of_the_prompts(llm):
    """Each prompt gets its answer, alone or in a batch, and the same one both times."""
    prompts = ["one", "two two", "three three three"]
    params = SamplingParams(max_tokens=5)

    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]

    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    assert [answer.finish_reason for answer in together] == ["length"] * 3
    assert [len(answer.prompt_tokens) for answer in together] == [3, 7, 17]


def test_token_ids_are_prompts_too(llm):
    """A flat list of ids is one prompt, a list of lists several; arrays will do."""
    assert len(llm.generate([1, 2, 3])) == 1
    assert len(llm.generate([[1, 2, 3], [4]])) == 2
    assert len(llm.generate(np.array([1, 2, 3]))) == 1
    assert len(llm.generate([np.int64(1), np.int64(2)])) == 1
    assert len(llm.generate(["text", [4], np.array([1, 2, 3])])) == 3
    assert llm.generate([]) == []


@pytest.mark.parametrize(
    "prompt",
    [[VOCAB_SIZE], [-1], [1 << 40], [1 << 70], [1.5], [None], [[[1]]], [[1, [2]]], ["a", [-1]]],
)
def test_what_is_no_token_of_the_model_is_refused(llm, prompt):
    """Lesson 68: an id beyond the vocabulary is the caller's error, and not the engine's end."""
    with pytest.raises(RequestError, match="token id"):
        llm.generate(prompt)

    assert llm.generate([1])[0].finish_reason == "length"


def test_a_repeated_prompt_is_found_in_the_cache(llm):
    """Lesson 64: `cached_tokens` says what was not computed again; salts keep tenants apart."""
    prompt = list(range(100))

    first, second = llm.generate(prompt)[0], llm.generate(prompt)[0]
    other = llm.generate(prompt, cache_salt="another tenant")[0]

    assert (first.cached_tokens, second.cached_tokens, other.cached_tokens) == (0, 96, 0)
    assert first.tokens == second.tokens == other.tokens


def test_a_stop_string_ends_an_answer(llm):
    """The text is cut at the stop string, and the engine stops computing it."""
    whole = llm.generate([7, 8, 9], SamplingParams(max_tokens=200))[0]
    stop = next(char for char in whole.text if char.isascii() and char.isprintable())

    cut = llm.generate([7, 8, 9], SamplingParams(max_tokens=200), stop=[stop])[0]

    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert len(cut.tokens) < len(whole.tokens)


def test_a_stop_string_may_be_alone(llm):
    """One string is one stop string, not one for each of its letters; an empty one is refused."""
    params = SamplingParams(max_tokens=30)
    whole = llm.generate([7, 8, 9], params)[0]

    assert llm.generate([7, 8, 9], params, stop="no such text")[0].text == whole.text
    with pytest.raises(RequestError, match="stop string is empty"):
        llm.generate([7, 8, 9], params, stop=[""])


@pytest.mark.parametrize(
    "conversations", ["hi", ["hi"], [{"content": "hi"}], [[{"role": "user"}]]]
)
def test_what_is_no_conversation_is_refused(llm, conversations):
    """A template would make a prompt of almost anything."""
    with pytest.raises(RequestError, match="list of messages"):
        llm.chat(conversations)


def test_chat_takes_one_conversation_or_several(llm):
    """A conversation goes through the model's template."""
    messages = [{"role": "user", "content": "hi"}]

    assert len(llm.chat(messages)) == 1
    assert [len(a.prompt_tokens) for a in llm.chat([messages, messages])] == [5, 5]


def test_a_refused_prompt_ends_the_batch_and_leaves_nothing_running(llm):
    """The error names the reason; what was added before it is aborted."""
    with pytest.raises(PromptTooLong):
        llm.generate([[1, 2], list(range(2)) * 400])
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[1, 2], []])
    with pytest.raises(RequestError, match="2 sampling params for 1"):
        llm.generate([[1, 2]], [SamplingParams(), SamplingParams()])


def test_progress_is_lines_where_there_is_no_terminal(llm, capsys):
    """At most ten lines, the last of which says that all is done."""
    llm.generate([[token] for token in range(25)], SamplingParams(max_tokens=1), show=True)

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "prompts: 25 of 25"


def test_progress_is_a_bar_on_a_terminal():
    """A terminal gets a bar, anything else gets lines."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    with show_progress("prompts", 2, out=terminal) as bar:
        bar.advance(2)

    assert "prompts" in terminal.getvalue()
    assert isinstance(show_progress("prompts", 2, out=io.StringIO()), LineProgress)
