"""The dashboard: static files without a build step and without third-party content.

The files hold no secrets and need no key. Their script asks for `/stats` with the key that the
user types in.
"""

from functools import cache
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

PATH = "/dashboard"

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


async def page(request: Request) -> Response:
    """The dashboard of an instance."""
    return _answer("dashboard.html")


async def router_page(request: Request) -> Response:
    """The dashboard of a router."""
    return _answer("router.html")


async def static_file(request: Request) -> Response:
    """One file of the dashboard."""
    name = request.path_params["name"]
    if name not in _files():
        raise HTTPException(404, f"the dashboard has no file {name!r}")
    return _answer(name)


def _answer(name: str) -> Response:
    return Response(
        _files()[name], headers=_HEADERS | {"content-type": _TYPES[name.rpartition(".")[2]]}
    )


@cache
def _files() -> dict[str, bytes]:
    """All files by name, read once."""
    folder = files("headwater.server") / "static"
    return {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if entry.name.rpartition(".")[2] in _TYPES
    }
