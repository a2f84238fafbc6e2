"""Text to token ids and back, and conversations to prompts."""

import subprocess
import sys

import numpy as np
import pytest

from headwater.engine.tokenizer import Tokenizer
from headwater.errors import ModelError, PromptTooLong, RequestError
from headwater.testing.engines import make_tokenizer_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(make_tokenizer_folder(tmp_path_factory.mktemp("model")))


def test_encode_gives_int32_and_decode_undoes_it(tokenizer):
    """Tokens are int32 arrays from here on; the text comes back unchanged."""
    text = "spring water, 山の水, 🏔"

    tokens = tokenizer.encode(text)

    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens.tolist()) == text


def test_a_text_that_cannot_fit_is_not_looked_at(tokenizer):
    """Lesson 68: a text is refused by its length alone, if it cannot fit even with the longest
    tokens."""
    longest = max(map(len, ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")))

    assert len(tokenizer.encode("a" * 2 * longest, max_tokens=2)) == 2 * longest
    for encode in (
        tokenizer.encode,
        lambda text, **limit: tokenizer.encode_chat(
            [{"role": "user", "content": text}], **limit
        ),
    ):
        with pytest.raises(PromptTooLong, match="characters"):
            encode("a" * (2 * longest + 1), max_tokens=2)


def test_special_tokens_are_skipped_unless_wanted(tokenizer):
    """An end token is skipped for readers, and shown on request."""
    tokens = tokenizer.encode("a<|end|>b").tolist()

    assert len(tokens) == 3
    assert tokenizer.decode(tokens) == "ab"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == "a<|end|>b"


def test_a_token_that_is_no_text_is_named_by_its_bytes(tokenizer):
    """A token that is only a part of a character has bytes, and a printable name made from
    them."""
    first = int(tokenizer.encode("€")[0])

    assert tokenizer.token_bytes(first) == b"\xe2"
    assert tokenizer.token_text(first) == "bytes:\\xe2"
    assert tokenizer.token_text(int(tokenizer.encode("a")[0])) == "a"


def test_chat_template_is_applied_with_its_own_special_tokens(tokenizer):
    """A conversation becomes exactly the prompt of the model's template."""
    messages = [{"role": "user", "content": "hi"}]

    assert tokenizer.chat_text(messages) == "<|user|>hi<|end|><|assistant|>"
    assert tokenizer.encode_chat(messages).tolist() == [257, 104, 105, 256, 258]


def test_a_settings_name_cannot_replace_the_messages(tokenizer):
    """Client settings of the template never override those of the server."""
    text = tokenizer.chat_text(
        [{"role": "user", "content": "mine"}], settings={"messages": [], "extra": 1}
    )

    assert "mine" in text


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.no.such.thing }}",
    ],
)
def test_a_template_runs_in_a_sandbox(tmp_path, template):
    """A template that tries to leave the sandbox, or refuses the messages, makes only its own
    request fail."""
    tokenizer = Tokenizer(make_tokenizer_folder(tmp_path, template=template))

    with pytest.raises(RequestError, match="chat template"):
        tokenizer.chat_text([{"role": "user", "content": "hi"}])


def test_templates_of_the_field_work(tmp_path):
    """Loop controls, the generation tag, plain JSON and dates work."""
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
        "{{ eos_token }}{{ strftime_now('%Y')[:2] }}"
    )
    tokenizer = Tokenizer(make_tokenizer_folder(tmp_path, template=template))

    text = tokenizer.chat_text(
        [{"role": "user", "content": "<é>"}, {"role": "x", "content": ""}]
    )

    assert text == '"<é>"<|end|>20'


def test_a_template_may_be_a_file_of_its_own(tmp_path):
    """transformers writes the template to chat_template.jinja, which wins over
    tokenizer_config.json."""
    folder = make_tokenizer_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("own file")

    assert Tokenizer(folder).chat_text([{"role": "user", "content": "hi"}]) == "own file"


def test_no_template_is_a_refused_chat(tmp_path):
    """A base model completes text, and refuses a chat with a message."""
    tokenizer = Tokenizer(make_tokenizer_folder(tmp_path, template=None))

    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.chat_text([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer_config.json", "[", "is not JSON"),
        ("tokenizer_config.json", "[]", "is not a JSON object"),
        ("chat_template.jinja", "{% if %}", "does not compile"),
    ],
)
def test_a_bad_folder_is_refused_with_a_message(tmp_path, name, content, sentence):
    """Lesson 61: an unusable folder raises an error at once that names the wrong file."""
    folder = make_tokenizer_folder(tmp_path)
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)

    with pytest.raises(ModelError, match=sentence):
        Tokenizer(folder)


@pytest.mark.slow
def test_the_http_process_imports_neither_torch_nor_transformers():
    """Everything that the HTTP process imports can be imported without them."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import headwater, headwater.cli, headwater.cli.serve, headwater.launch.supervisor, headwater.launch.worker\n"
        "import headwater.engine.llm, headwater.testing.engines\n"
    )

    subprocess.run([sys.executable, "-c", script], check=True)
