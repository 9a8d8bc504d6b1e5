"""Who may ask what: a token that an address carries once, and a cookie that keeps it.

Any user of a machine can reach its loopback, so names and blocks need a token; health, status and
metrics name nobody and need none. All tokens come from one secret, the sidecar's, which its runtime
note holds (0600) and which also opens its tcp endpoint. What is handed on is derived from it, so
that an address in a log opens the page and nothing else:

* ``GET /open?token=PAGE`` leaves a cookie and goes on to ``/``. The token is then in no address and
  in no Referer. The cookie is ``HttpOnly`` and ``SameSite=Strict``; its name has the port in it,
  since browsers send cookies to all ports of a host. Its value opens no other door.
* Programs send ``Authorization: Bearer`` with the secret or the page's token.
* What changes something needs the edit token too, in the header ``X-Kvgraph-Edit``. It is in no
  cookie: what else listens on this host may be shown those. ``kvgraph open --edit`` puts it behind
  the ``#`` of the address, where the page finds it and no server does.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Final

from fastapi import FastAPI, Header, HTTPException, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response

# Derives tokens from a sidecar's secret, and the page's address; see ``page_access``.

EDIT_HEADER: Final = "X-Kvgraph-Edit"
"""In which the edit token is sent."""


def page_token(secret: str) -> str:
    """The token that opens the page, and every question."""
    return derived(secret, "page")


def edit_token(secret: str) -> str:
    """The token that lets readers of the page change the weights."""
    return derived(secret, "edit")


def page_address(url: str, secret: str, *, edit: bool = False) -> str:
    """The address of the page of the sidecar at ``url`` for a browser; with ``edit`` to change
    things."""
    address = f"{url}/open?token={page_token(secret)}"
    return f"{address}#edit={edit_token(secret)}" if edit else address


def derived(secret: str, use: str) -> str:
    """48 hexadecimal digits for one use, which reveal neither the secret nor those of other
    uses."""
    return hmac.new(secret.encode(), f"kvgraph {use}".encode(), hashlib.sha256).hexdigest()[:48]


_KEPT_S: Final = 30 * 86_400  # s of a cookie; a restarted sidecar has another secret; chosen
_REFUSAL: Final = (
    "this needs the token of the sidecar's runtime note: `kvgraph open` gives the address that "
    "carries it, `kvgraph explain` reads it by itself"
)


class Access:
    """Judges requests by what they carry.

    Args:
        secret: The sidecar's token.
    """

    def __init__(self, secret: str) -> None:
        self._bearers = [secret, page_token(secret)]
        self._page, self._cookie = page_token(secret), derived(secret, "cookie")
        self._edit = edit_token(secret)

    def reads(self) -> Callable[..., None]:
        """A dependency that refuses whoever carries neither token nor cookie."""

        def check(request: Request, authorization: Annotated[str, Header()] = "") -> None:
            if not (self._is_bearer(authorization) or self._has_cookie(request)):
                raise HTTPException(401, _REFUSAL, {"WWW-Authenticate": "Bearer"})

        return check

    def edits(self) -> Callable[..., None]:
        """A dependency that refuses whoever does not carry the edit token."""

        def check(token: Annotated[str, Header(alias=EDIT_HEADER)] = "") -> None:
            if not _same(token, self._edit):
                raise HTTPException(
                    403, "changes need the edit token: `kvgraph open --edit` gives the address"
                )

        return check

    def opened(self, request: Request, token: str) -> Response:
        """The answer to an address with a token: a cookie and the page, or a refusal."""
        if not _same(token, self._page):
            return PlainTextResponse(
                "this address is out of date: `kvgraph open` gives the present one\n", 401
            )
        answer = RedirectResponse("/", 303)
        answer.headers["Referrer-Policy"] = "no-referrer"
        answer.headers["Cache-Control"] = "no-store"
        answer.set_cookie(
            _cookie_name(request), self._cookie, _KEPT_S, httponly=True, samesite="strict"
        )
        return answer

    def _is_bearer(self, authorization: str) -> bool:
        return any(_same(authorization, f"Bearer {each}") for each in self._bearers)

    def _has_cookie(self, request: Request) -> bool:
        return _same(request.cookies.get(_cookie_name(request), ""), self._cookie)


def _cookie_name(request: Request) -> str:
    return f"kvgraph-{request.url.port or 80}"


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


# The page: files built from ``web``, and what a browser lets them do.

PAGE: Final = Path(__file__).parent / "page"

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Only files of this sidecar run or style anything, and nothing is sent elsewhere."""

_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again, and answered with 304
    "Vary": "Accept, Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A built file as it is sent; ``tag`` is its ETag."""

    body: bytes
    packed: bytes
    media_type: str
    tag: str


@cache
def page_file(path: Path) -> PageFile:
    """A file of the page, read and compressed once."""
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    return PageFile(body, gzip.compress(body, mtime=0), _TYPES[path.suffix], tag)


def add_assets(app: FastAPI) -> None:
    """Serve what ``index.html`` names."""
    assets = {path.name: path for path in sorted((PAGE / "assets").glob("*"))}

    @app.get("/assets/{name}")
    async def asset(name: str, request: Request) -> Response:
        if name not in assets:
            raise HTTPException(404, "no such file")
        return sent(page_file(assets[name]), request)


def index(request: Request) -> Response:
    """The page itself."""
    return sent(page_file(PAGE / "index.html"), request)


def wants_page(request: Request) -> bool:
    """Whether a browser asks, rather than a program that takes whatever there is."""
    return "text/html" in request.headers.get("accept", "")


def sent(file: PageFile, request: Request) -> Response:
    """``file``, compressed where the client takes that; 304 where it has it."""
    headers = {**_HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            file.packed, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.media_type
        )
    return Response(file.body, headers=headers, media_type=file.media_type)
