"""Messages between the processes: every field survives, and invalid messages are refused."""

import ast
from pathlib import Path

import msgspec
import numpy as np
import pytest

import headwater
from headwater.cache import Hint
from headwater.engine import wire
from headwater.engine.client import (
    CloseSession,
    GetStats,
    Pause,
    ReloadWeights,
    ResetCache,
    ResetReport,
)
from headwater.engine.owners import RequestOwners
from headwater.errors import EngineDead, ModelError, NotDrained, PromptTooLong
from headwater.metrics.stats import EngineStats, TierStats
from headwater.scheduler.request import (
    Request,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
    Usage,
)
from headwater.scheduler.results import StepOutputs
from headwater.testing.engines import make_echo_info
from headwater.types import RequestId


def test_a_request_survives_encoding_and_decoding():
    """Every field of a request arrives; the tokens arrive as a read-only int32 view."""
    params = SamplingParams(
        max_tokens=5, logit_bias={7: -1.5}, stop_token_ids=(1, 2), seed=2**62
    )
    request = Request(
        request_id=RequestId("r"),
        tokens=np.arange(9, dtype=np.int32),
        params=params,
        arrival_s=1.25,
        priority=-3,
        cache_salt="tenant",
        load_policy="deadline",
        load_timeout_s=0.5,
        session_id="s",
        cache_hint=Hint(returns_in_s=2.5),
        num_resumed_tokens=4,
    )

    message = wire.decode_to_engine(wire.encode(wire.pack_request(request)))
    assert isinstance(message, wire.Add)
    arrived = wire.unpack_request(message)

    assert arrived.tokens.dtype == np.int32
    assert not arrived.tokens.flags.writeable
    assert arrived.tokens.tolist() == request.tokens.tolist()
    assert arrived.params == params
    assert (arrived.request_id, arrived.arrival_s) == ("r", 1.25)
    assert (arrived.priority, arrived.cache_salt, arrived.num_resumed_tokens) == (
        -3,
        "tenant",
        4,
    )
    assert (arrived.load_policy, arrived.load_timeout_s) == ("deadline", 0.5)
    assert (arrived.session_id, arrived.cache_hint) == ("s", Hint(returns_in_s=2.5))


def test_a_request_crosses_as_its_tokens_and_little_more():
    """Lesson 32: the message has four bytes per token and a few for the rest, no cache data and
    no KV."""
    request = Request(
        request_id=RequestId("r"),
        tokens=np.arange(10_000, dtype=np.int32),
        params=SamplingParams(),
        arrival_s=0.0,
    )

    assert len(wire.encode(wire.pack_request(request))) < 4 * 10_000 + 512


def test_an_output_survives_encoding_and_decoding():
    """Tokens, log-probabilities, usage and reasons arrive as they were."""
    entry = TokenLogprobs(chosen=-0.5, rank=2, top_ids=(1, 2), top_values=(-0.1, -0.5))
    usage = Usage(prompt_tokens=9, cached_tokens=4, by_tier={"device": 4}, computed=5)
    output = SequenceOutput(
        request_id=RequestId("r"),
        tokens=[1, 70_000],
        logprobs=[entry, None],
        finish_reason="stop",
        stop_token=2,
        usage=usage,
    )

    message = wire.decode_from_engine(wire.encode(wire.Outputs([wire.pack_output(output)])))

    assert isinstance(message, wire.Outputs)
    assert wire.unpack_output(message.outputs[0]) == output


def test_single_tokens_travel_as_two_columns_and_arrive_as_outputs():
    """A step's outputs arrive unchanged, be they whole outputs or single tokens."""
    last = SequenceOutput(RequestId("z"), [9], [None], "length")
    outputs = StepOutputs([last])
    names = [RequestId("a"), RequestId("b"), RequestId("c")]
    kept = np.array([True, False, True])
    outputs.add_tokens(names, np.array([5, -6, 70_000], dtype=np.int32), kept)

    message = wire.decode_from_engine(wire.encode(wire.pack_outputs(outputs)))

    assert isinstance(message, wire.Outputs)
    assert len(message.outputs) == 1
    expected = [
        last,
        *(SequenceOutput(RequestId(n), [t], [None]) for n, t in (("a", 5), ("c", 70_000))),
    ]
    assert list(wire.unpack_outputs(message)) == expected == list(outputs)


def test_each_worker_gets_the_tokens_of_its_own_requests():
    """A step is packed into one message per worker; tokens of aborted requests are left out."""
    owners = RequestOwners()
    for name, worker in (("a", b"1"), ("b", b"2"), ("c", b"1"), ("end", b"2")):
        owners.add(name, worker)
    outputs = StepOutputs([SequenceOutput(RequestId("end"), [4], [None], "stop", 4)])
    names = [RequestId(name) for name in ("a", "gone", "b", "c")]
    outputs.add_tokens(names, np.arange(4, dtype=np.int32), np.ones(4, dtype=np.bool_))

    found = {
        worker: [(o.request_id, o.tokens) for o in _unpacked(frame)]
        for worker, frame in owners.pack(outputs)
    }

    assert found == {b"1": [("a", [0]), ("c", [3])], b"2": [("end", [4]), ("b", [2])]}
    assert len(owners) == 3


def _unpacked(frame: bytes) -> list[SequenceOutput]:
    message = wire.decode_from_engine(frame)
    assert isinstance(message, wire.Outputs)
    return list(wire.unpack_outputs(message))


def test_a_refusal_survives_encoding_and_decoding():
    """The server gets the engine's refusal unchanged."""
    message = wire.Refusal("r", "PromptTooLong", "too long")
    assert wire.decode_from_engine(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Ready(make_echo_info("folder")),
        wire.EngineFailed("ModelError", "no such folder"),
    ],
)
def test_every_report_survives_encoding_and_decoding(message):
    """A report of the engine is one line, and the supervisor reads it back."""
    line = wire.encode_line(message)
    assert line.count(b"\n") == 1
    assert msgspec.json.decode(line, type=wire.Report) == message


STATS = EngineStats(
    num_running=1,
    tiers={"device": TierStats(num_blocks=4, free=1, held=1, cached=2, evictable=2)},
    misses={"never_seen": 1},
)


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (Pause(), None),
        (GetStats(), STATS),
        (ResetCache(frozenset(("device",))), ResetReport(removed={"device": 3})),
        (CloseSession("s", "tenant"), True),
        (ReloadWeights("folder"), make_echo_info("folder")),
    ],
)
def test_every_control_call_and_its_reply_survive_encoding_and_decoding(call, result):
    """A call arrives with its arguments, and its reply with the type that the call declares."""
    message = wire.decode_to_engine(wire.encode(wire.pack_call(3, call)))
    reply = wire.decode_from_engine(wire.encode(wire.pack_reply(3, result, None)))

    assert (message.number, wire.unpack_call(message)) == (3, call)
    assert (reply.number, wire.unpack_reply(call, reply)) == (3, result)


def test_a_refused_control_call_raises_with_its_reason():
    """The client of a call that the engine refused gets the engine's message."""
    reply = wire.decode_from_engine(
        wire.encode(wire.pack_reply(3, None, NotDrained("drain first")))
    )

    with pytest.raises(NotDrained, match="drain first"):
        wire.unpack_reply(ReloadWeights(), reply)


def test_an_unknown_control_call_raises():
    """A name that is not declared is an error at the receiver, and calls nothing."""
    with pytest.raises(msgspec.ValidationError, match="__class__"):
        wire.unpack_call(wire.PackedCall(3, "__class__", msgspec.Raw(wire.encode({}))))


@pytest.mark.parametrize("frame", [b"", b"\x93", b"\x91\xa4evil", wire.encode(["add", 1])])
def test_a_frame_that_fits_no_type_raises(frame):
    """Lesson 18: a bad message raises an error; it is never guessed or dropped."""
    with pytest.raises(msgspec.DecodeError):
        wire.decode_to_engine(frame)


def test_errors_are_rebuilt_by_name_from_our_tree_only():
    """An unknown name becomes EngineDead."""
    assert isinstance(wire.rebuild_error("PromptTooLong", "x"), PromptTooLong)
    assert isinstance(wire.rebuild_error("ModelError", "x"), ModelError)
    assert isinstance(wire.rebuild_error("ZeroDivisionError", "x"), EngineDead)
    assert isinstance(wire.rebuild_error("__builtins__", "x"), EngineDead)


def test_nothing_in_the_package_imports_pickle():
    """Lesson 66: no socket carries pickled data; the package does not import pickle at all."""
    folder = Path(headwater.__file__).parent
    banned = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert banned.isdisjoint(name.split(".")[0] for name in names), path
            assert not (isinstance(node, ast.Attribute) and node.attr == "recv_pyobj"), path
