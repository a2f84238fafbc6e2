"""`headwater.LLM` on the built-in model gives the output of the server."""

import re
import subprocess
import sys
from typing import Any

import pytest

import headwater
from headwater.errors import ConfigError
from tests.device.families import assert_same_tokens

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def llm():
    llm = headwater.LLM(num_blocks_override=64, max_model_len=2048, num_threads=1)
    yield llm
    llm.close()


def test_offline_equals_served(llm, server):
    """The same prompt gives the same tokens in this process and behind HTTP, greedy and seeded."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9},
    ]
    for options in ways:
        params = headwater.SamplingParams(max_tokens=16, ignore_eos=True, logprobs=2, **options)

        mine = llm.generate("a spring in the mountains", params)[0]
        answer = server.complete(
            prompt="a spring in the mountains",
            max_tokens=16,
            ignore_eos=True,
            return_token_ids=True,
            **options,
        ).json()

        tops = [entry.top_values for entry in mine.logprobs if entry is not None]
        gaps = [best - second for best, second in tops]
        if "seed" in options:
            gaps = [1.0] * len(gaps)  # chance decides, not the best two
        assert_same_tokens(mine.tokens, answer["choices"][0]["token_ids"], gaps)
        if mine.tokens == answer["choices"][0]["token_ids"]:
            assert mine.text == answer["choices"][0]["text"]


def test_a_conversation_is_reused_turn_by_turn(llm):
    """Lesson 64: the next turn hits the one before, and reports how much."""
    messages = [{"role": "user", "content": "tell me about water " * 10}]
    first = llm.chat(messages, headwater.SamplingParams(max_tokens=4))[0]
    second = llm.chat(
        [
            *messages,
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "more"},
        ],
        headwater.SamplingParams(max_tokens=4),
    )[0]

    assert first.cached_tokens == 0
    assert second.cached_tokens == 192


def test_importing_the_package_does_not_import_torch():
    """`headwater.LLM` exists, and costs nothing until it is used."""
    script = (
        "import sys, headwater\n"
        "assert 'LLM' in headwater.__all__\n"
        "assert 'torch' not in sys.modules\n"
        "assert headwater.LLM.__name__ == 'LLM'\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_folder_that_is_not_a_model_is_refused(tmp_path):
    """Lesson 61: there is an error with a message, and no half-built object."""
    with pytest.raises(headwater.HeadwaterError, match=r"config\.json"):
        headwater.LLM(str(tmp_path))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"block_tokens": "64"}, "'block_tokens' of LLM is wrong: Expected `int`, got `str`"),
        (
            {"max_num_seqs": 1.5},
            "'max_num_seqs' of LLM is wrong: Expected `int | null`, got `float`",
        ),
        (
            {"prefix_caching": "yes"},
            "'prefix_caching' of LLM is wrong: Expected `bool`, got `str`",
        ),
        ({"model": 7}, "'model' of LLM is wrong: Expected `str | null`, got `int`"),
        (
            {"storage_config": [1]},
            "'storage_config' of LLM is wrong: Expected `object`, got `array`",
        ),
        ({"block_token": 64}, "LLM has no setting 'block_token'; did you mean 'block_tokens'?"),
        ({"block_tokens": 0}, "--block-size"),
    ],
)
def test_a_setting_of_another_type_is_named(settings, sentence):
    """Lesson 61: the setting is refused by its name, before a model is loaded."""
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        headwater.LLM(**settings)
