"""The built-in model: made from a seed, the same everywhere, complete or not at all."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jinja2
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from headwater.device import builtin
from headwater.device.builtin import LlamaShape, ensure, ensure_model, make_llama
from headwater.device.fingerprint import fingerprint
from headwater.device.model import load
from headwater.errors import ModelError
from headwater.native.folder import cache_folder, filled_whole
from tests.device.driver import Driver
from tests.device.families import Reference, assert_same_tokens

SMALL = LlamaShape(layers=1, hidden=16, ffn=24, heads=2, kv_heads=1, head_dim=8)


def test_the_same_seed_makes_the_same_model(tmp_path: Path) -> None:
    """Two folders made from one seed have one fingerprint; another seed gives another one."""
    first, second, other = (
        fingerprint(make_llama(tmp_path / name, SMALL, seed=seed))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )

    assert first == second != other


def test_the_built_in_model_is_made_once_and_kept(tmp_path: Path) -> None:
    """The second time nothing is written, and no temporary folder remains."""
    folder = ensure_model("small", SMALL)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns

    assert ensure_model("small", SMALL) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in folder.parent.glob(".*")] == []


def test_a_broken_draft_leaves_nothing(tmp_path: Path) -> None:
    """After a crash in the middle there is no model, never a partial one (lesson 61)."""
    target = tmp_path / "model"

    def crash(draft: Path) -> None:
        (draft / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), filled_whole(target) as draft:
        crash(draft)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "generation_config.json is not valid JSON"),
        ("[7]", "generation_config.json is not a JSON object"),
        ('{"eos_token_id": "</s>"}', "generation_config.json: eos_token_id must be a token id"),
        (
            '{"eos_token_id": [1, null]}',
            "generation_config.json: eos_token_id must be a token id",
        ),
        (
            '{"eos_token_id": {"a": 1}}',
            "generation_config.json: eos_token_id must be a token id",
        ),
    ],
)
def test_a_broken_generation_config_gets_a_message(
    tmp_path: Path, content: str, sentence: str
) -> None:
    """Lesson 61: the message names the file, and nothing half loaded is left."""
    folder = make_llama(tmp_path / "model", SMALL, seed=0)
    (folder / "generation_config.json").write_text(content)

    with pytest.raises(ModelError, match=re.escape(sentence)):
        load(folder)


def test_the_generation_config_names_the_end(tmp_path: Path) -> None:
    """The generation config may name one end id or several; without them, the model's own
    config is used."""
    folder = make_llama(tmp_path / "model", SMALL, seed=0)
    path = folder / "generation_config.json"
    path.write_text('{"eos_token_id": [3, 5]}')
    several = load(folder).eos_token_ids
    path.write_text("{}")
    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"eos_token_id": 9})
    )

    assert several == (3, 5)
    assert load(folder).eos_token_ids == (9,)


def test_the_first_of_two_processes_that_make_the_model_wins(tmp_path: Path) -> None:
    """The folder of the second process is dropped silently; that of the first is not
    touched."""
    target = tmp_path / "model"

    with filled_whole(target) as slow:
        (slow / "by").write_text("slow")
        with filled_whole(target) as quick:
            (quick / "by").write_text("quick")

    assert (target / "by").read_text() == "quick"
    assert list(tmp_path.iterdir()) == [target]


def test_the_cache_folder_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cache folder is `HEADWATER_CACHE`, or the usual place in the home folder."""
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("HEADWATER_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "headwater"


@pytest.mark.parametrize("text", ["", "plain", "naïve — 東京 🙂\n\ttab", "<|user|>hi<|end|>"])
def test_the_tokenizer_keeps_every_byte(text: str) -> None:
    """A byte is a token of the same number; specials are one token each."""
    tokenizer = Tokenizer.from_file(str(ensure() / "tokenizer.json"))

    ids = tokenizer.encode(text).ids

    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    if "<|" not in text:
        assert ids == list(text.encode())


def test_every_id_of_a_larger_vocabulary_decodes() -> None:
    """Ids beyond the bytes, which random weights sample, decode to words."""
    tokenizer = builtin._tokenizer(300)

    words = [tokenizer.decode([token]) for token in range(264, 300)]

    assert all(words)
    assert len(set(words)) == len(words)


def test_the_chat_template_marks_the_turns() -> None:
    """Roles and ends are special tokens, and the prompt asks for an answer."""
    config = json.loads((ensure() / "tokenizer_config.json").read_text())
    template = jinja2.Template(config["chat_template"])

    text = template.render(
        messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True
    )

    assert text == "<|user|>hi<|end|><|assistant|>"


@pytest.mark.slow
def test_the_built_in_model_gives_the_tokens_of_transformers() -> None:
    """The model is loaded without a name; its greedy tokens equal those of `generate`."""
    model = load(None)
    tokens = np.frombuffer(b"Every command works offline.", dtype=np.uint8).astype(np.int32)
    driver = Driver(model)
    sequence = driver.add(tokens)

    driver.finish(sequence, count=24)

    assert (model.num_layers, model.kv_heads, model.head_dim) == (4, 4, 32)
    assert model.eos_token_ids == (257,)
    expected, gaps = Reference(ensure()).generate(tokens, 24)
    until = len(expected)  # generate stops at the end token, the driver does not
    assert_same_tokens(sequence.output[:until], expected, gaps)


@pytest.mark.slow
def test_the_built_in_model_is_made_without_torch(tmp_path: Path) -> None:
    """A process that only tokenises makes the model without torch and transformers."""
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path; from headwater.device.builtin import LlamaShape, make_llama\n"
        "make_llama(Path(sys.argv[1]), LlamaShape(layers=1, hidden=16, ffn=24))"
    )

    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)

    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].shape == (16,)


@pytest.mark.slow
def test_loading_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """No progress bar of transformers appears on the engine's standard error."""
    load(None)

    printed = capfd.readouterr()
    assert printed.out == printed.err == ""
