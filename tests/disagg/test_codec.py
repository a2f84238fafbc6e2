"""Encoding of control messages: a message survives it, and nothing else is accepted."""

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import binary, dictionaries, floats, integers, lists, text

from headwater.disagg.protocol import messages
from headwater.disagg.protocol.codec import MAX_JSON_BYTES, decode, encode
from headwater.disagg.protocol.errors import Malformed
from headwater.disagg.protocol.messages import (
    First,
    Grant,
    Message,
    Pull,
    Reason,
    Renew,
    Start,
    Timings,
)
from headwater.scheduler.request import Request, SamplingParams, TokenLogprobs, Usage
from headwater.types import RequestId

REQUEST = Request(
    request_id=RequestId("r"),
    tokens=np.array([1, 2, 2**31 - 1], dtype=np.int32),
    params=SamplingParams(
        max_tokens=7,
        temperature=0.5,
        logit_bias={3: -1.5},
        seed=-5,
        logprobs=2,
        stop_token_ids=(4, 5),
    ),
    arrival_s=3.0,
    priority=-2,
    cache_salt="Salz",
    num_resumed_tokens=1,
)
START = Start(handoff=2**63 - 1, request=REQUEST, link="tcp://h:1", num_found=2, within_s=1.5)
FIRST = First(
    handoff=1,
    token=9,
    logprobs=TokenLogprobs(chosen=-0.5, rank=1, top_ids=(9,), top_values=(float("-inf"),)),
    usage=Usage(prompt_tokens=3, cached_tokens=2, by_tier={"device": 2}, computed=1),
    num_blocks=1,
    num_bytes=32,
    timings=Timings(queue_s=0.1, ask_s=0.2, compute_s=0.3),
)
PLAIN: list[Message] = [
    messages.Accepted(1, 2.5),
    messages.StartRefused(1, Reason.BUSY),
    messages.Ask(1),
    Grant(handoff=1, start_block=2, num_blocks=3, term_s=10.0),
    messages.Refuse(1, Reason.NO_ROOM),
    Renew(1, 2.5),
    messages.Renewed(1, 2.5),
    FIRST,
    messages.HandoffDone(1),
    messages.Cancel(1, Reason.ABORTED),
    messages.Failed(1, Reason.PUSH),
    Pull(handoff=1, link="shm://x", start_block=0, num_blocks=2),
    messages.Pulled(1, 2),
]


@pytest.mark.parametrize("message", PLAIN, ids=lambda m: type(m).__name__)
def test_a_message_comes_out_as_it_went_in(message):
    """Encoding and decoding changes no message of any kind."""
    assert decode(encode(message)) == message


def test_a_start_carries_the_whole_request():
    """The message has the tokens, the parameters and everything else that decides the first
    token."""
    start = decode(encode(START))

    assert isinstance(start, Start)
    assert (start.handoff, start.link, start.num_found) == (2**63 - 1, "tcp://h:1", 2)
    assert start.request.tokens.tolist() == REQUEST.tokens.tolist()
    assert start.request.params == REQUEST.params
    assert (start.request.priority, start.request.cache_salt) == (-2, "Salz")
    assert start.request.num_resumed_tokens == REQUEST.num_resumed_tokens > 0


def test_a_start_carries_the_longest_grammar_that_the_server_takes():
    """A long JSON schema does not end the connection, on which other hand-offs are in flight."""
    grammar = "\U0001f600" * (1 << 20)  # schemas of forced tool calls
    params = replace(REQUEST.params, grammar=grammar)
    start = decode(encode(replace(START, request=replace(REQUEST, params=params))))

    assert isinstance(start, Start)
    assert start.request.params.grammar == grammar


def test_the_kinds_in_this_test_are_all_there_are():
    """A new kind of message must be added to the test."""
    assert {type(message) for message in [*PLAIN, START]} == set(Message.__args__)


@pytest.mark.parametrize(
    "shape",
    [
        {"kind": "Ask"},
        {"kind": "Ask", "handoff": "1"},
        {"kind": "Ask", "handoff": -1},
        {"kind": "Ask", "handoff": True},
        {"kind": "Ask", "handoff": 1.0},
        {"kind": "Ask", "handoff": 2**64},
        {"kind": "Ask", "handoff": 1, "more": 1},
        {"kind": "Renew", "handoff": 1, "sent_s": float("nan")},
        {"kind": "Refuse", "handoff": 1, "reason": "because"},
        {"kind": "Message", "handoff": 1},
        {"kind": ["Ask"], "handoff": 1},
        {"handoff": 1},
        [],
        7,
    ],
)
def test_a_value_of_the_wrong_type_is_malformed(shape):
    """Fields may not be missing, unknown, of another type or out of range."""
    text = json.dumps(shape).encode()

    with pytest.raises(Malformed):
        decode(struct.pack("<I", len(text)) + text)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0",
        struct.pack("<I", 100) + b"{}",
        struct.pack("<I", MAX_JSON_BYTES + 1) + bytes(MAX_JSON_BYTES + 1),
        struct.pack("<I", 40_000) + b"[" * 20_000 + b"]" * 20_000,
        encode(START)[:-1],
        encode(Renew(1, 2.0)) + b"\1\0\0\0",
    ],
    ids=lambda body: f"{len(body)} bytes",
)
def test_broken_bodies_are_malformed(body):
    """Bodies are broken if they are cut short, too long, nested too deep, or have tokens where
    none belong."""
    with pytest.raises(Malformed):
        decode(body)


@given(binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(body):
    """Lesson 66: bytes of a stranger have no other effect."""
    try:
        decode(body)
    except Malformed:
        return


@given(
    dictionaries(
        text(max_size=9),
        integers() | floats() | text(max_size=5) | lists(integers()),
        max_size=5,
    )
)
def test_a_start_with_any_other_parameters_is_malformed(params):
    """A missing or an additional sampling parameter is refused."""
    good = encode(START)
    (length,) = struct.unpack_from("<I", good)
    shape = {**json.loads(good[4 : 4 + length]), "params": params}
    text = json.dumps(shape).encode()

    with pytest.raises(Malformed):
        decode(struct.pack("<I", len(text)) + text + good[4 + length :])
