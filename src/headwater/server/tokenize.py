"""POST /tokenize and /detokenize: the tokenizer without the engine."""

from starlette.requests import Request
from starlette.responses import Response

from headwater.server.answers import DetokenizeAnswer, TokenizeAnswer
from headwater.server.body import JsonResponse, body_size, read_body
from headwater.server.chat_prompt import plain_messages, template_tools
from headwater.server.errors import RequestRefused
from headwater.server.schema import DetokenizeRequest, TokenizeRequest
from headwater.server.service import Service
from headwater.types import Tokens


async def tokenize(request: Request) -> Response:
    """Token ids of a text or a conversation."""
    service: Service = request.app.state.service
    body = await read_body(
        request, TokenizeRequest, max_bytes=service.config.limits.max_body_bytes
    )
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestRefused("send either prompt or messages", param="prompt")
    answer = await service.in_thread(lambda: _answer(service, body), size=body_size(request))
    return JsonResponse(answer)


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    service: Service = request.app.state.service
    body = await read_body(
        request, DetokenizeRequest, max_bytes=service.config.limits.max_body_bytes
    )
    service.check_model(body.model)
    text = await service.in_thread(
        lambda: service.tokenizer.decode(
            body.tokens, skip_special_tokens=bool(body.skip_special_tokens)
        ),
        size=len(body.tokens),
    )
    return JsonResponse(DetokenizeAnswer(prompt=text))


def _answer(service: Service, body: TokenizeRequest) -> TokenizeAnswer:
    """Runs in a thread: a prompt may have a million tokens."""
    tokens = _encode(service, body).tolist()
    names = None
    if body.return_token_strs:
        names = [service.tokenizer.token_piece(token) for token in tokens]
    return TokenizeAnswer(
        tokens=tokens,
        count=len(tokens),
        max_model_len=service.engine.info.max_model_len,
        token_strs=names,
    )


def _encode(service: Service, body: TokenizeRequest) -> Tokens:
    max_tokens = service.engine.info.max_model_len
    if body.messages is not None:
        return service.tokenizer.encode_chat(
            plain_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            settings=body.chat_template_kwargs,
            tools=template_tools(body.tools),
            max_tokens=max_tokens,
        )
    return service.tokenizer.encode(
        body.prompt or "",
        add_special_tokens=body.add_special_tokens is not False,
        max_tokens=max_tokens,
    )
