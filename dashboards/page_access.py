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

import hmac
from collections.abc import Callable
from typing import Annotated, Final

from fastapi import Header, HTTPException, Request
from fastapi.responses import PlainTextResponse, RedirectResponse, Response

from .page_tokens import EDIT_HEADER, derived, edit_token, page_token

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
