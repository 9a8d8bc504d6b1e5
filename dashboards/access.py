"""Access to the HTTP surface by tokens and a cookie, and the page's files.

Any user of a machine can reach its loopback, so names and blocks need a token; health, status and
metrics name nobody and need none. All tokens are derived from one secret, the sidecar's, which its
runtime note holds (0600) and which also opens its tcp endpoint. So an address in a log opens the
page and nothing else:

* ``GET /open?token=PAGE`` sets a cookie and redirects to ``/``; after that the token is in no
  address and no Referer. The cookie is ``HttpOnly`` and ``SameSite=Strict``; its name contains the
  port, since browsers send cookies to all ports of a host. Its value is good for nothing else.
* Programs send ``Authorization: Bearer`` with the secret or the page's token.
* Changes need the edit token too, in the header ``X-Kvgraph-Edit``. It is in no cookie, since
  other servers on this host may be sent those. ``kvgraph open --edit`` puts it behind the ``#`` of
  the address, which browsers send to no server.
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

# Tokens derived from a sidecar's secret, and the page's address.

EDIT_HEADER: Final = "X-Kvgraph-Edit"  # carries the edit token


def page_token(secret: str) -> str:
    return derived(secret, "page")


def edit_token(secret: str) -> str:
    return derived(secret, "edit")


def page_address(url: str, secret: str, *, edit: bool = False) -> str:
    """Return the page's address for a browser; with ``edit``, one that allows changes."""
    address = f"{url}/open?token={page_token(secret)}"
    return f"{address}#edit={edit_token(secret)}" if edit else address


def derived(secret: str, use: str) -> str:
    """Return 48 hexadecimal digits for one use, which reveal neither secret nor other uses'."""
    return hmac.new(secret.encode(), f"kvgraph {use}".encode(), hashlib.sha256).hexdigest()[:48]


_KEPT_S: Final = 30 * 86_400  # s of a cookie; a restarted sidecar has another secret; chosen
_REFUSAL: Final = (
    "this needs the token of the sidecar's runtime note: `kvgraph open` gives the address that "
    "carries it, `kvgraph explain` reads it by itself"
)


class Access:
    """Checks requests' tokens and cookies, which are derived from the sidecar's ``secret``."""

    def __init__(self, secret: str) -> None:
        self._bearers = [secret, page_token(secret)]
        self._page, self._cookie = page_token(secret), derived(secret, "cookie")
        self._edit = edit_token(secret)

    def reads(self) -> Callable[..., None]:
        """A dependency that refuses requests with neither token nor cookie."""

        def check(request: Request, authorization: Annotated[str, Header()] = "") -> None:
            if not (self._is_bearer(authorization) or self._has_cookie(request)):
                raise HTTPException(401, _REFUSAL, {"WWW-Authenticate": "Bearer"})

        return check

    def edits(self) -> Callable[..., None]:
        """A dependency that refuses requests without the edit token."""

        def check(token: Annotated[str, Header(alias=EDIT_HEADER)] = "") -> None:
            if not _same(token, self._edit):
                raise HTTPException(
                    403, "changes need the edit token: `kvgraph open --edit` gives the address"
                )

        return check

    def opened(self, request: Request, token: str) -> Response:
        """Set the cookie and redirect to the page if the token is right; else 401."""
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


# The page: files built from ``web``, and its content security policy.

PAGE: Final = Path(__file__).parent / "page"

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Only this sidecar's files can run or style anything, and nothing is sent elsewhere."""

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
    "Cache-Control": "no-cache",  # revalidated each time, mostly with 304
    "Vary": "Accept, Accept-Encoding",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A built file, plain and compressed; ``tag`` is its ETag."""

    body: bytes
    packed: bytes
    media_type: str
    tag: str


@cache
def page_file(path: Path) -> PageFile:
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    return PageFile(body, gzip.compress(body, mtime=0), _TYPES[path.suffix], tag)


def add_assets(app: FastAPI) -> None:
    assets = {path.name: path for path in sorted((PAGE / "assets").glob("*"))}

    @app.get("/assets/{name}")
    async def asset(name: str, request: Request) -> Response:
        if name not in assets:
            raise HTTPException(404, "no such file")
        return sent(page_file(assets[name]), request)


def index(request: Request) -> Response:
    return sent(page_file(PAGE / "index.html"), request)


def wants_page(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "")


def sent(file: PageFile, request: Request) -> Response:
    """Return ``file``, compressed if the client accepts that, or 304 if it has it."""
    headers = {**_HEADERS, "ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(
            file.packed, headers=headers | {"Content-Encoding": "gzip"}, media_type=file.media_type
        )
    return Response(file.body, headers=headers, media_type=file.media_type)
