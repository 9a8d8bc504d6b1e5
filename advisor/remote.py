"""Asks a running sidecar over its HTTP surface."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any, Final

from ..graph.errors import KvGraphError
from ..graph.ipc.runtime import running_sidecars, token_of

TIMEOUT_S: Final = 5.0  # for an answer; chosen
TOKEN_VARIABLE: Final = "KVGRAPH_SIDECAR__TOKEN"
_MAX_ANSWER: Final = 64 << 20  # bytes; chosen
_TRIES: Final = 10  # of a question to a busy sidecar; chosen
# Never through a proxy: the sidecar is on this machine.
_opener: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class RemoteError(KvGraphError):
    """A sidecar cannot be asked, or does not know."""


class UnknownError(RemoteError):
    """The sidecar has never heard of what it was asked about."""


class BusySidecarError(RemoteError):
    """Too many ask the sidecar; the same question may be asked again in a second."""


_REFUSALS: Final = {404: UnknownError, 503: BusySidecarError}


def sidecar_urls(url: str | None) -> list[str]:
    """``url``, or those of every running sidecar of this user.

    Raises:
        RemoteError: None is running.
    """
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise RemoteError(f"--url {url!r} is not a URL; allowed: http://127.0.0.1:PORT")
        return [url.rstrip("/")]
    found = [sidecar.http for sidecar in running_sidecars()]
    if not found:
        raise RemoteError(
            "no sidecar of this user is running; start an engine with AITHER_KVCACHE_GRAPH=1, or "
            "`kvgraph serve`, or name one with --url"
        )
    return found


def only_sidecar_url(url: str | None) -> str:
    """``url``, or that of this user's only running sidecar.

    Raises:
        RemoteError: None is running, or several are.
    """
    urls = sidecar_urls(url)
    if len(urls) > 1:
        raise RemoteError(f"{len(urls)} sidecars are running; name one of {', '.join(urls)}")
    return urls[0]


def ask(url: str, path: str, timeout_s: float = TIMEOUT_S) -> Any:
    """The JSON answer to ``GET url/path``, asked with the token of the sidecar's note; see
    ``answer_to``.

    Args:
        timeout_s: For each part of the answer.
    """
    return answer_to(_request(url, path), timeout_s)


def answer_to(request: urllib.request.Request, timeout_s: float = TIMEOUT_S) -> Any:
    """A sidecar's answer, from JSON.

    Raises:
        UnknownError: It answered 404.
        BusySidecarError: It answered 503.
        RemoteError: It answered something else than 200, or not at all.
    """
    url = f"{request.type}://{request.host}"
    try:
        with _opener.open(request, timeout=timeout_s) as answer:
            return json.loads(answer.read(_MAX_ANSWER))
    except urllib.error.HTTPError as error:
        with error:
            detail = _detail(error.read(4096))
        if detail and error.code in _REFUSALS:
            raise _REFUSALS[error.code](detail) from None
        answered = f"{url} answered {error.code}"
        kind = _REFUSALS.get(error.code, RemoteError)
        raise kind(f"{answered}: {detail}" if detail else answered) from None
    except (OSError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise RemoteError(f"no sidecar answers at {url}: {reason}") from None
    except ValueError:
        raise RemoteError(f"what answers at {url} is not a kvgraph sidecar") from None


def ask_patiently(url: str, path: str, timeout_s: float = TIMEOUT_S) -> Any:
    """As ``ask``, but a sidecar that is busy is asked again, a few times."""
    for _ in range(_TRIES - 1):
        try:
            return ask(url, path, timeout_s)
        except BusySidecarError:
            time.sleep(1.0)
    return ask(url, path, timeout_s)


def _request(url: str, path: str) -> urllib.request.Request:
    request = urllib.request.Request(url + path)
    if token := secret_of(url):
        request.add_header("Authorization", f"Bearer {token}")
    return request


def secret_of(url: str) -> str:
    """The token of the sidecar at ``url``: its note's, or the environment's; empty without one."""
    return token_of(url) or os.environ.get(TOKEN_VARIABLE, "")


def _detail(body: bytes) -> str:
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return ""
