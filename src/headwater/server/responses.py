"""/v1/responses: conversations whose turns the server may keep."""

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from headwater.errors import HeadwaterError
from headwater.server.answers import UsageAnswer
from headwater.server.body import ASGIResponse, JsonResponse, body_size, read_body
from headwater.server.chat import chat_job
from headwater.server.endpoint import Call, accept, respond
from headwater.server.errors import RequestRefused, error_answer
from headwater.server.generation import Delta, GenerationJob, Transcript
from headwater.server.middleware import access_of
from headwater.server.params import session_name
from headwater.server.parsing.base import ParsedAnswer
from headwater.server.response_items import ItemWriter, items_of
from headwater.server.response_store import StoredResponse
from headwater.server.responses_request import chat_request
from headwater.server.responses_schema import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseDeleted,
    ResponseErrorEvent,
    ResponseEvent,
    ResponsesAnswer,
    ResponsesRequest,
    ResponsesUsage,
)
from headwater.server.schema import CalledFunction, ChatRequest, Message, MessageToolCall
from headwater.server.service import Service
from headwater.server.streaming import EventStyle


async def responses(request: Request) -> ASGIResponse:
    """Generate the next turn."""
    service: Service = request.app.state.service
    limit = service.config.limits.max_body_bytes
    body = await read_body(request, ResponsesRequest, max_bytes=limit)
    tenant = _tenant(request, body.cache_salt)
    before = await _previous(service, body, tenant)
    earlier = before.messages if before else ()
    chat = await service.convert(lambda: chat_request(body, earlier), size=body_size(request))
    call = await accept(request, chat)
    response_id = service.new_response_id(call.request_id, tenant)
    if chat.session_id is None:
        # A stored conversation is one session, whichever turn is continued.
        known = before.session_id if before else session_name(chat)
        chat.session_id = known or (response_id if body.store is not False else None)
    job = await chat_job(call, max_tokens=None, default_max_tokens=body.max_output_tokens)
    return await respond(call, job, _ResponsesFormat(call, job, body, response_id, tenant))


async def stored_response(request: Request) -> ASGIResponse:
    """A stored response: GET reads it, DELETE removes it."""
    service: Service = request.app.state.service
    response_id = request.path_params["response_id"]
    found = await _stored(
        service, response_id, _tenant(request, request.query_params.get("cache_salt"))
    )
    if request.method != "DELETE":
        return Response(found.answer, media_type="application/json")
    service.shared.remove_response(response_id)
    return JsonResponse(ResponseDeleted(id=response_id))


def _tenant(request: Request, cache_salt: str | None) -> str:
    """The tenant whose stored responses a request may use: its API key together with its salt.
    A salt alone is not enough, because a client can send any salt."""
    caller = access_of(request).caller
    return f"{caller.name}\n{cache_salt or caller.cache_salt}"


async def _previous(
    service: Service, body: ResponsesRequest, tenant: str
) -> StoredResponse | None:
    if body.previous_response_id is None:
        return None
    return await _stored(service, body.previous_response_id, tenant)


async def _stored(service: Service, response_id: str, cache_salt: str) -> StoredResponse:
    found = await service.shared.get_response(response_id, cache_salt)
    if found is None:
        raise RequestRefused(
            f"the response {response_id[:140]!r} is not stored on this instance: it was never "
            "stored, its lifetime is over, or another instance has it. Send the whole conversation",
            param="previous_response_id",
            status=404,
            code="previous_response_not_found",
        )
    return StoredResponse.decode(found)


def _error_event(error: HeadwaterError) -> Struct:
    found = error_answer(error).error
    return ResponseErrorEvent(message=found.message, code=found.code, param=found.param)


RESPONSES_EVENTS = EventStyle(is_named=True, last=b"", error=_error_event)


class _ResponsesFormat:
    """Writes output as a response, and stores it when it is complete."""

    style = RESPONSES_EVENTS
    reports_usage = True

    def __init__(
        self,
        call: Call[ChatRequest],
        job: GenerationJob,
        body: ResponsesRequest,
        response_id: str,
        tenant: str,
    ) -> None:
        self._tenant = tenant
        self._service = call.service
        self._messages = call.body.messages
        self._body = body
        self._job = job
        self._id = response_id
        self._items = ItemWriter(response_id)
        self._transcript = Transcript()

    def whole(self, transcripts: Sequence[Transcript], usage: UsageAnswer) -> Struct:
        answer = self._answer(transcripts[0], usage)
        answer.output = items_of(self._id, transcripts[0].parsed)
        self._store(transcripts[0].parsed, answer)
        return answer

    def events(self, delta: Delta, usage: UsageAnswer | None) -> list[Struct]:
        found: list[ResponseEvent] = []
        if delta.is_first:
            begun = self._answer(Transcript(), None)
            names = ("response.created", "response.in_progress")
            found += [self._items.event(name, response=begun) for name in names]
        self._transcript.append(delta)
        found += self._items.write(delta.parsed)
        # On the instance that began the stream each of these tokens may have been an event.
        self._items.skip_numbers(len(delta.tokens) - 1)
        if delta.finish_reason is not None:
            found += self._items.close()
            answer = self._answer(self._transcript, usage)
            answer.output = self._items.items or items_of(self._id, self._transcript.parsed)
            self._store(self._transcript.parsed, answer)
            name = f"response.{answer.status}"
            found.append(self._items.event(name, response=answer))
        return [*found]

    def usage_event(self, usage: UsageAnswer) -> Struct:
        raise AssertionError("the last event of a response has the usage")

    def _answer(self, entry: Transcript, usage: UsageAnswer | None) -> ResponsesAnswer:
        body = self._body
        is_cut = entry.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        answer = ResponsesAnswer(
            id=self._id,
            created_at=self._job.created,
            model=self._service.model_name,
            status=status if entry.finish_reason else "in_progress",
            output=[],
            usage=None if usage is None else _usage(usage),
            incomplete_details=IncompleteDetails() if is_cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
            temperature=body.temperature,
            text=body.text or {"format": {"type": "text"}},
            tool_choice=body.tool_choice or "auto",
            tools=list(body.tools or ()),
            top_p=body.top_p,
        )
        if entry.num_malformed:
            answer.malformed_tool_calls = entry.num_malformed
        return answer

    def _store(self, parsed: ParsedAnswer, answer: ResponsesAnswer) -> None:
        if self._body.store is False or not self._service.config.limits.max_stored_responses:
            return
        # Instructions hold for one response only, so they are not part of what is stored.
        turns = self._messages[1 if self._body.instructions else 0 :]
        entry = StoredResponse(
            answer=msgspec.json.encode(answer),
            messages=(*turns, _message(parsed)),
            session_id=self._job.session_id,
        )
        self._service.shared.put_response(self._id, self._tenant, entry.encode())


def _message(parsed: ParsedAnswer) -> Message:
    """The answer as a message of the history."""
    calls = [
        MessageToolCall(
            id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments)
        )
        for call in parsed.calls
    ]
    return Message(
        role="assistant",
        content=parsed.content,
        tool_calls=calls or None,
        reasoning_content=parsed.reasoning or None,
    )


def _usage(usage: UsageAnswer) -> ResponsesUsage:
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached_tokens=usage.prompt_tokens_details.cached_tokens
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
        ),
        total_tokens=usage.total_tokens,
    )
