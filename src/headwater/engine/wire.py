"""Messages of the engine process: msgpack to and from HTTP workers, JSON lines to and from the
supervisor.

Messages are typed and never pickled. Token ids are little-endian int32 bytes. A message that does
not fit its type raises an error at the receiver.
"""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from headwater import errors
from headwater.cache import Hint
from headwater.engine.client import CALLS, ControlCall, EngineInfo, R, reply_type
from headwater.errors import HeadwaterError, RequestError
from headwater.scheduler.request import (
    Request,
    SamplingParams,
    SequenceOutput,
    TokenLogprobs,
    Usage,
)
from headwater.scheduler.results import StepOutputs
from headwater.types import LoadPolicy, RequestId, Tokens

_TOKEN_TYPE = np.dtype("<i4")


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """A new request."""

    request_id: str
    tokens: bytes
    params: SamplingParams
    arrival_s: float
    priority: int
    cache_salt: str
    load_policy: LoadPolicy | None = None
    load_timeout_s: float | None = None
    prefill: str = ""
    local_fallback: bool = True
    can_return: bool = False
    num_resumed_tokens: int = 0
    session_id: str = ""
    cache_hint: Hint | None = None


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End these requests, in any state."""

    request_ids: list[str]


class PackedCall(msgspec.Struct, tag="call", array_like=True, frozen=True):
    """A `ControlCall`. A `Reply` with the same number answers it."""

    number: int
    name: str
    arguments: msgspec.Raw


class EngineStart(msgspec.Struct, frozen=True):
    """The first line that an engine process reads: its settings, and the descriptors that it
    inherits."""

    settings: msgspec.Raw
    """Settings for the function that builds the core."""

    max_queued: int = 1 << 30
    """Maximum number of waiting sequences in addition to the running ones, over all workers."""

    is_paused: bool = False
    """Whether an operator had paused the engine before."""

    host_memory: tuple[int, int] | None = None
    """Descriptors of the host tier's memory, which outlives this engine: the blocks, and the
    slot records. None if the engine has its own memory."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Supervisor to engine: leave the loop and exit."""


class WorkerGone(msgspec.Struct, tag="worker_gone", frozen=True):
    """Supervisor to engine: a worker has ended; abort its requests."""

    worker: str


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Supervisor to engine: answer with `Pong`."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Engine to supervisor: the engine is built and takes requests."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, tag="failure", frozen=True):
    """Engine to supervisor: the engine could not start, or its loop ended. It is the last
    message of the process."""

    kind: str
    sentence: str


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """Engine to supervisor: the process is running."""


class InfoChanged(msgspec.Struct, tag="info", array_like=True, frozen=True):
    """Engine to HTTP workers: other weights are served from now on."""

    info: EngineInfo


class Output(msgspec.Struct, array_like=True, frozen=True):
    """What one step generated for one sequence."""

    request_id: str
    tokens: bytes
    logprobs: list[TokenLogprobs | None]
    finish_reason: str | None
    stop_token: int | None
    usage: Usage | None
    detail: str = ""
    prompt_logprobs: list[TokenLogprobs] | None = None


class Outputs(msgspec.Struct, tag="outputs", array_like=True, frozen=True):
    """All outputs of one step, in one message.

    Nearly every output of a large step is one token of a sequence that goes on. Those are sent as
    two columns instead of as `Output`.
    """

    outputs: list[Output]
    request_ids: list[str] = []
    tokens: bytes = b""
    """One token for each of `request_ids`."""


class Refusal(msgspec.Struct, tag="refusal", array_like=True, frozen=True):
    """A request that the engine refuses."""

    request_id: str
    kind: str
    sentence: str


class Reply(msgspec.Struct, tag="reply", array_like=True, frozen=True):
    """The result of a `PackedCall`, or the reason why it was refused."""

    number: int
    result: msgspec.Raw
    refusal: str | None
    kind: str = ""
    """Class of the error, if the call was refused."""


ToEngine = Add | Abort | PackedCall
FromEngine = Outputs | Refusal | Reply | InfoChanged
Order = Stop | WorkerGone | Ping
Report = Ready | EngineFailed | Pong

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_start = msgspec.json.Decoder(EngineStart).decode
decode_order = msgspec.json.Decoder(Order).decode
decode_report = msgspec.json.Decoder(Report).decode


def encode_line(message: msgspec.Struct) -> bytes:
    """A message between supervisor and engine, or supervisor and worker, as one line of
    JSON."""
    return msgspec.json.encode(message) + b"\n"


def pack_request(request: Request) -> Add:
    """A request as a message."""
    return Add(
        request_id=request.request_id,
        tokens=pack_tokens(request.tokens),
        params=request.params,
        arrival_s=request.arrival_s,
        priority=request.priority,
        cache_salt=request.cache_salt,
        load_policy=request.load_policy,
        load_timeout_s=request.load_timeout_s,
        prefill=request.prefill,
        local_fallback=request.local_fallback,
        can_return=request.can_return,
        num_resumed_tokens=request.num_resumed_tokens,
        session_id=request.session_id,
        cache_hint=request.cache_hint,
    )


def unpack_request(message: Add) -> Request:
    """The request of a message. Its tokens are a read-only view of the message."""
    return Request(
        request_id=RequestId(message.request_id),
        tokens=np.frombuffer(message.tokens, dtype=_TOKEN_TYPE),
        params=message.params,
        arrival_s=message.arrival_s,
        priority=message.priority,
        cache_salt=message.cache_salt,
        load_policy=message.load_policy,
        load_timeout_s=message.load_timeout_s,
        prefill=message.prefill,
        local_fallback=message.local_fallback,
        can_return=message.can_return,
        num_resumed_tokens=message.num_resumed_tokens,
        session_id=message.session_id,
        cache_hint=message.cache_hint,
    )


def pack_output(output: SequenceOutput) -> Output:
    """An output as a message."""
    tokens = output.tokens
    # Nearly every output has one token; numpy takes eight times as long for it.
    if len(tokens) == 1:
        packed = tokens[0].to_bytes(4, "little", signed=True)
    else:
        packed = np.array(tokens, dtype=_TOKEN_TYPE).tobytes()
    return Output(
        request_id=output.request_id,
        tokens=packed,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        stop_token=output.stop_token,
        usage=output.usage,
        detail=output.detail,
        prompt_logprobs=output.prompt_logprobs,
    )


def pack_outputs(outputs: StepOutputs) -> Outputs:
    """All outputs of a step as one message."""
    return Outputs(
        [pack_output(output) for output in outputs.others],
        outputs.request_ids,  # type: ignore[arg-type]  # a list of ids is a list of strings
        pack_tokens(outputs.tokens),
    )


def pack_tokens(tokens: Tokens) -> bytes:
    """Token ids as little-endian int32 bytes."""
    return tokens.astype(_TOKEN_TYPE, copy=False).tobytes()


def unpack_outputs(message: Outputs) -> Iterator[SequenceOutput]:
    """The outputs of a message."""
    for entry in message.outputs:
        yield unpack_output(entry)
    tokens = np.frombuffer(message.tokens, dtype=_TOKEN_TYPE).tolist()
    for request_id, token in zip(message.request_ids, tokens, strict=True):
        yield SequenceOutput(RequestId(request_id), [token], [None])


def unpack_output(message: Output) -> SequenceOutput:
    """The output of a message."""
    return SequenceOutput(
        request_id=RequestId(message.request_id),
        tokens=np.frombuffer(message.tokens, dtype=_TOKEN_TYPE).tolist(),
        logprobs=message.logprobs,
        finish_reason=message.finish_reason,
        stop_token=message.stop_token,
        usage=message.usage,
        detail=message.detail,
        prompt_logprobs=message.prompt_logprobs,
    )


def pack_call(number: int, call: ControlCall[Any]) -> PackedCall:
    """A control call as a message."""
    return PackedCall(number, type(call).__name__, msgspec.Raw(encode(call)))


def unpack_call(message: PackedCall) -> ControlCall[Any]:
    """The control call of a message. Raises an error if its name or arguments are unknown."""
    if message.name not in CALLS:
        raise msgspec.ValidationError(f"unknown control call {message.name!r}")
    call: ControlCall[Any] = msgspec.msgpack.decode(message.arguments, type=CALLS[message.name])
    return call


def pack_reply(number: int, result: Any, refusal: RequestError | None) -> Reply:  # noqa: ANN401 -- by call
    """The end of a control call as a message."""
    if refusal is not None:
        return Reply(number, msgspec.Raw(encode(None)), str(refusal), type(refusal).__name__)
    return Reply(number, msgspec.Raw(encode(result)), None)


def unpack_reply(call: ControlCall[R], reply: Reply) -> R:
    """The result of `call`. Raises the engine's RequestError if it was refused."""
    if reply.refusal is not None:
        raise rebuild_error(reply.kind, reply.refusal)
    result: R = msgspec.msgpack.decode(reply.result, type=reply_type(type(call)))
    return result


def rebuild_error(kind: str, sentence: str) -> HeadwaterError:
    """The error class of this name; an unknown name becomes EngineDead."""
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, HeadwaterError):
        return found(sentence)
    return errors.EngineDead(sentence)
