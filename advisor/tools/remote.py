"""Queries a running sidecar over HTTP."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from http.client import HTTPException, responses
from typing import Any, Final
from urllib.parse import urlsplit

from ...dashboards.access import EDIT_HEADER, edit_token
from ...dashboards.server import MOST_BODY_BYTES
from ...graph.errors import KvGraphError
from ...graph.wire.endpoints import running_sidecars, token_of
from ...graph.wire.opener import opener

TIMEOUT_S: Final = 5.0  # for an answer; chosen
TOKEN_VARIABLE: Final = "KVGRAPH_SIDECAR__TOKEN"
_MAX_ANSWER: Final = 64 << 20  # bytes; chosen
_TRIES: Final = 10  # attempts at asking a busy sidecar; chosen
_LONGEST_S: Final = 60.0  # longest pause between two attempts; chosen
_opener: Final = opener(through_proxies=False)  # the sidecar is on this machine


class RemoteError(KvGraphError):
    """A sidecar cannot be queried, or cannot answer."""


class AddressError(RemoteError):
    """The sidecar has no such path, block, session or request."""

    exit_code = 2


class UnknownError(RemoteError):
    """The sidecar does not know the object of the request."""


class BusySidecarError(RemoteError):
    again_in_s = 1.0  # seconds after which to retry


class RefusedError(RemoteError):
    """The sidecar refuses a request body: it is malformed or too large."""


_REFUSALS: Final = {404: UnknownError, 413: RefusedError, 422: RefusedError, 503: BusySidecarError}


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        named = named and not parts.query and not parts.fragment  # as the page's address has them
    except ValueError:  # an address of IPv6 without its bracket, or no port
        return False
    return named and url.isprintable() and " " not in url


def sidecar_urls(url: str | None) -> list[str]:
    if url is not None:
        if not _is_address(url):
            raise AddressError(f"{url!r} is not a URL; allowed: http://127.0.0.1:PORT")
        return [url.rstrip("/")]
    found = [sidecar.http for sidecar in running_sidecars()]
    if not found:
        raise RemoteError(
            "no sidecar of this user is running; start an engine with AITHER_KVCACHE_GRAPH=1, or "
            "`kvgraph serve`, or give the URL of another one"
        )
    return found


def only_sidecar_url(url: str | None) -> str:
    urls = sidecar_urls(url)
    if len(urls) > 1:
        raise RemoteError(f"{len(urls)} sidecars are running; name one of {', '.join(urls)}")
    return urls[0]


class EditEndpoint:
    """A path that accepts changes, of the sidecar at ``url`` or this user's only one."""

    MOST_ANSWERED: Final = 1 << 20  # bytes; chosen: an answer is read while others wait

    def __init__(self, path: str, url: str | None = None, token: str | None = None) -> None:
        url = only_sidecar_url(url)
        secret = secret_of(url) if token is None else token
        self._url = url + path
        self._headers = {
            "Authorization": f"Bearer {secret}",
            EDIT_HEADER: edit_token(secret),
            "Content-Type": "application/json",
        }

    def send(self, body: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """POST ``body`` and return the JSON answer."""
        data = json.dumps(body).encode()
        if len(data) > MOST_BODY_BYTES:
            raise RefusedError(
                f"the body has {len(data):,} bytes; allowed: {MOST_BODY_BYTES:,} at most"
            )
        request = urllib.request.Request(self._url, data, self._headers, method="POST")
        return answer_to(request, timeout_s, self.MOST_ANSWERED)


def ask(url: str, path: str, timeout_s: float = TIMEOUT_S) -> Any:
    """GET ``url/path`` with the sidecar's token and return the JSON answer."""
    request = urllib.request.Request(url + path)
    if token := secret_of(url):
        request.add_header("Authorization", f"Bearer {token}")
    return answer_to(request, timeout_s)


def answer_to(
    request: urllib.request.Request, timeout_s: float = TIMEOUT_S, most_bytes: int = _MAX_ANSWER
) -> Any:
    """Send a request and decode the JSON answer; ``timeout_s`` applies to each read of the socket.
    Raises UnknownError, RefusedError, BusySidecarError or RemoteError.
    """
    url = f"{request.type}://{request.host}"
    try:
        with _opener.open(request, timeout=timeout_s) as answer:
            return json.loads(answer.read(most_bytes))
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(url, error) from None
    except (OSError, HTTPException, OverflowError) as error:
        reason = getattr(error, "reason", error)
        raise RemoteError(f"no sidecar answers at {url}: {reason}") from None
    except (ValueError, RecursionError):
        raise RemoteError(f"what answers at {url} is not a kvgraph sidecar") from None


def ask_patiently(url: str, path: str, timeout_s: float = TIMEOUT_S) -> Any:
    """As ``ask``, with some retries while the sidecar is busy."""
    for _ in range(_TRIES - 1):
        try:
            return ask(url, path, timeout_s)
        except BusySidecarError as busy:
            time.sleep(busy.again_in_s)
    return ask(url, path, timeout_s)


def secret_of(url: str) -> str:
    """Return the sidecar's token, from its runtime file or the environment; empty if unknown."""
    return token_of(url) or os.environ.get(TOKEN_VARIABLE, "")


def _refusal(url: str, error: urllib.error.HTTPError) -> RemoteError:
    detail, kind = _detail(error), _REFUSALS.get(error.code)
    answered = f"{url} answered {error.code}"
    if detail == responses.get(error.code):  # of the server, which knows no such path
        kind = None
    if kind is None:
        return RemoteError(f"{answered}: {detail}" if detail else answered)
    refusal = kind(detail or answered)
    after = error.headers.get("Retry-After", "")
    if isinstance(refusal, BusySidecarError) and after.isdecimal():
        refusal.again_in_s = min(_LONGEST_S, float(after))
    return refusal


def _detail(error: urllib.error.HTTPError) -> str:
    """The answer's reason; empty if it gives none."""
    try:
        return str(json.loads(error.read(4096))["detail"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError, RecursionError):
        return ""
