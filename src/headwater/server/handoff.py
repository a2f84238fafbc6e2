"""What a router says in headers about a request: which instance computes its prompt."""

import hmac
import re
from dataclasses import replace

from starlette.requests import Request

from headwater.server.errors import RequestRefused
from headwater.server.generation import GenerationJob
from headwater.server.router.messages import FALLBACK_HEADER, PREFILL_HEADER, TOKEN_HEADER
from headwater.server.service import Service

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}")


def check_role(service: Service) -> None:
    """Refuse where this instance only computes prompts for others."""
    if service.engine.info.role == "prefill":
        raise RequestRefused(
            "this instance only prefills, for other instances; ask the router, or an instance "
            "whose role is decode or mixed",
            code="prefill_only",
        )


def handed_off(request: Request, service: Service, job: GenerationJob) -> GenerationJob:
    """`job`, with its prompts computed where the headers say; Refused where they may not."""
    address = request.headers.get(PREFILL_HEADER)
    if address is None:
        return job
    if not service.engine.info.peer_address:
        raise RequestRefused("this instance takes part in no hand-offs", code="no_peers")
    token = service.config.peer_token or ""
    given = request.headers.get(TOKEN_HEADER, "")
    if not token or not hmac.compare_digest(given.encode(), token.encode()):
        raise RequestRefused("the peer token is not ours", status=403, code="peer_token")
    if not _ADDRESS.fullmatch(address):
        raise RequestRefused(f"{PREFILL_HEADER} is an address, HOST:PORT", code="bad_address")
    here = request.headers.get(FALLBACK_HEADER) == "local"
    return replace(job, prefill=address, local_fallback=here)
