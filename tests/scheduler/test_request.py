"""`SamplingParams` refuses invalid values of any caller."""

import math
from typing import Any

import numpy as np
import pytest

from headwater.errors import RequestError
from headwater.scheduler.request import (
    BOUNDS,
    LEAST_TEMPERATURE,
    Request,
    SamplingParams,
    length_end,
)
from headwater.types import RequestId


@pytest.mark.parametrize("name", [name for name in BOUNDS if name != "logit_bias"])
def test_numbers_outside_their_bounds_are_refused(name):
    """Values below, above, infinite and NaN are refused; the message names the field."""
    least, most = BOUNDS[name]
    for value in (least - 0.1, most + 0.1, math.inf, -math.inf, math.nan):
        asked: dict[str, Any] = {name: value}
        with pytest.raises(RequestError, match=name):
            SamplingParams(**asked)
    for value in (most, least or 1e-300):
        asked = {name: value}
        SamplingParams(**asked)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"min_tokens": -1}, "min_tokens must be at least 0"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"top_p": 0.0}, "top_p must be more than 0"),
        ({"logit_bias": {3: math.nan}}, "logit_bias must be between -100 and 100, got nan"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9 and max_tokens is 8"),
    ],
)
def test_invalid_sampling_parameters_get_a_message(asked, sentence):
    """Counts, biases, and fields that contradict each other are refused with a message."""
    with pytest.raises(RequestError, match=sentence):
        SamplingParams(**asked)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", "16"),
        ("max_tokens", 1.5),
        ("max_tokens", None),
        ("min_tokens", True),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", [0.5]),
        ("top_k", 3.0),
        ("presence_penalty", 1j),
        ("logit_bias", [(3, 1.0)]),
        ("logit_bias", {"3": 1.0}),
        ("logit_bias", {3: "much"}),
        ("seed", "7"),
        ("seed", None),
        ("logprobs", True),
        ("stop_token_ids", [3]),
        ("stop_token_ids", ("3",)),
        ("ignore_eos", 1),
    ],
)
def test_a_value_of_another_kind_is_named(name, value):
    """Lesson 68: there is a message with the field instead of a TypeError from inside."""
    asked: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=f"^{name} must be "):
        SamplingParams(**asked)


def test_numbers_may_be_numpys():
    """A number from an array is a number too."""
    asked: dict[str, Any] = {
        "max_tokens": np.int64(4),
        "temperature": np.float32(0.5),
        "logit_bias": {np.int32(3): np.float64(1.0)},
    }
    assert SamplingParams(**asked).max_tokens == 4


def test_nearly_greedy_is_greedy():
    """Below the smallest temperature the most likely token is chosen."""
    assert SamplingParams(temperature=0.0).is_greedy
    assert SamplingParams(temperature=LEAST_TEMPERATURE / 2).is_greedy
    assert not SamplingParams(temperature=LEAST_TEMPERATURE).is_greedy


def resumed_request(num_resumed_tokens, *, num_tokens=8, max_tokens=10):
    return Request(
        request_id=RequestId("r"),
        tokens=np.arange(num_tokens, dtype=np.int32),
        params=SamplingParams(max_tokens=max_tokens),
        arrival_s=0.0,
        num_resumed_tokens=num_resumed_tokens,
    )


@pytest.mark.parametrize(("num_resumed_tokens", "max_tokens"), [(-1, 5), (4, 5), (3, 3)])
def test_resumed_tokens_have_bounds(num_resumed_tokens, max_tokens):
    """Resumed tokens cannot exceed the tokens or the limit; at least one token must be left."""
    with pytest.raises(RequestError, match="resume"):
        length_end(
            resumed_request(num_resumed_tokens, num_tokens=3, max_tokens=max_tokens), 100
        )


def test_resumed_tokens_count_towards_the_length():
    """Three of ten tokens exist, so seven more are generated."""
    assert length_end(resumed_request(3), 100) == 15
    assert length_end(resumed_request(3), 12) == 12
