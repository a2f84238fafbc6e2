"""The page: a few files that are served as they are. No build, nothing from elsewhere.

They hold nothing secret and are given to anyone who can connect; what they show they ask for
with the key that their reader types in.
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
    """The page itself."""
    return _answer("dashboard.html")


async def router_page(request: Request) -> Response:
    """The page of a router: its instances."""
    return _answer("router.html")


async def part(request: Request) -> Response:
    """One of the files it is made of."""
    name = request.path_params["name"]
    if name not in _parts():
        raise HTTPException(404, f"the page has no part {name!r}")
    return _answer(name)


def _answer(name: str) -> Response:
    return Response(
        _parts()[name], headers=_HEADERS | {"content-type": _TYPES[name.rpartition(".")[2]]}
    )


@cache
def _parts() -> dict[str, bytes]:
    """Every file, by name; read once."""
    folder = files("headwater.server") / "static"
    return {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if entry.name.rpartition(".")[2] in _TYPES
    }
