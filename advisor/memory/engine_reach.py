"""Whether an engine can be reached: said in the log at the start, and to clients later."""

from __future__ import annotations

import logging
from typing import Final

import httpx
import orjson

from ..fleet.proxy.upstream import NothingAnsweredError, Reply, Upstream
from ..fleet.turns.callers import Call

_START_S: Final = 2.0  # for a word of the engine's at the start; chosen: people wait for it
_PATH: Final = "/v1/models"  # which engines and routers answer alike
_BAD_GATEWAY: Final = 502

_log = logging.getLogger(__name__)


async def warn_if_unreachable(engine: Upstream) -> None:
    """Ask an engine once; the log says so if it does not answer. It may come later."""
    try:
        await engine.ask(_PATH, _START_S)
    except httpx.RequestError as error:
        _log.warning("the engine at %s does not answer (%s): until it does, requests get status %d",
                     engine.url, f"{type(error).__name__} {error}".strip(),
                     _BAD_GATEWAY)  # fmt: skip


def gone(engine: Upstream, call: Call, error: NothingAnsweredError) -> Reply:
    """What a client reads whose engine answers nothing: where that is, and what is known of it."""
    if not error.sent:
        what = "cannot be reached"
    elif call.repeatable:
        what = "dropped this request"
    else:
        what = "dropped this request, and may have done what it asks"
    said = {
        "message": f"the engine at {engine.url} {what}: {error}",
        "type": "service_unavailable",
        "code": _BAD_GATEWAY,
    }
    body = orjson.dumps({"error": said})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    response = httpx.Response(_BAD_GATEWAY, stream=httpx.ByteStream(body))
    return Reply(_BAD_GATEWAY, headers, b"", response, response.aiter_raw())
