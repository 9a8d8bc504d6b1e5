"""Surfaces that make other messages of a client's: its own are noted before, for hints.

Of Anthropic's API, ``cache_control`` is read from the raw body: vLLM's protocol drops it.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ...once import Once
from ..hints.tags import KEY
from .message_places import ClientMessage, client_messages
from .rendered_chat import CLIENTS

logger = logging.getLogger(__name__)

_MARK: Final = "_kvgraph_wrapped"
_once = Once(logger)
_TTL_S: Final = {"5m": 300.0, "1h": 3600.0}
"""How long a breakpoint keeps what stands before it; the first is Anthropic's default."""
_MOST: Final = 4  # breakpoints of a request, as Anthropic allows


def note_clients() -> None:
    """From now on, note a client's own messages where vLLM's serving classes make others.

    Called with every chat: a server renders one before it serves, when it has loaded these classes;
    other processes never load them.
    """
    for module, name, method, note in _SURFACES:
        if (loaded := sys.modules.get(module)) is not None:
            _wrap(getattr(loaded, name), method, note)


def _wrap(kind: type, name: str, note: Any) -> None:
    original = getattr(kind, name)
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    async def noted(self: Any, request: Any, raw_request: Any = None, *rest: Any) -> Any:
        token = None
        try:
            token = CLIENTS.set(await note(request, raw_request))
        except Exception as error:  # whatever a client sends: vLLM is to judge it
            _once.warn("note", "kvgraph: a client's messages are not read (%s); ignored",
                       type(error).__name__)  # fmt: skip
        try:
            return await original(self, request, raw_request, *rest)
        finally:
            if token is not None:
                CLIENTS.reset(token)

    setattr(noted, _MARK, True)
    setattr(kind, name, noted)


async def _of_responses(request: Any, raw_request: Any) -> list[ClientMessage]:
    items = request.input
    if isinstance(items, str):
        return [ClientMessage("user", (items,))]
    return client_messages(items)


async def _of_anthropic(request: Any, raw_request: Any) -> list[ClientMessage]:
    messages = client_messages(request.messages)
    (system,) = client_messages([{"role": "system", "content": request.system}])
    body = await raw_request.body() if raw_request is not None else b""
    if b"cache_control" in body:
        hints = list(_breakpoints(json.loads(body), len(messages)))
        if hints:
            _add(request, hints)
    return [system._replace(numbered=False), *messages]


def _add(request: Any, hints: Sequence[dict[str, Any]]) -> None:
    """Put hints into a request beside what its client says itself, which stands before them."""
    transfer = dict(request.kv_transfer_params or {})
    said = transfer.get(KEY)
    said = dict(said) if isinstance(said, dict) else {}
    listed = said.get("messages")
    said["messages"] = [*hints, *(listed if isinstance(listed, list) else ())]
    request.kv_transfer_params = {**transfer, KEY: said}


def _breakpoints(body: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Hints that keep what stands up to the last breakpoint, for as long as it says."""
    last, seconds = -1, 0.0
    for index, message in enumerate(body.get("messages") or ()):
        for ttl in _controls(message):
            last, seconds = index, max(seconds, ttl)
    heads = [*_controls(body.get("system")), *_controls(body.get("tools"))]
    if heads or last >= 0:
        yield {"role": "system", "pinned": max([seconds, *heads])}
    for index in range(min(last + 1, count)):
        yield {"index": index, "pinned": seconds}


def _controls(value: Any, depth: int = 0) -> Iterator[float]:
    """The seconds that each breakpoint in a part of the body asks for."""
    if isinstance(value, Mapping):
        control = value.get("cache_control")
        if isinstance(control, Mapping) and control.get("type") == "ephemeral":
            yield _TTL_S.get(str(control.get("ttl")), _TTL_S["5m"])
        if depth < _MOST:
            yield from _controls(value.get("content"), depth + 1)
    elif isinstance(value, list) and depth < _MOST:
        for each in value:
            yield from _controls(each, depth + 1)


_SURFACES: Final = (
    ("vllm.entrypoints.anthropic.serving", "AnthropicServingMessages", "create_messages",
     _of_anthropic),
    ("vllm.entrypoints.openai.responses.serving", "OpenAIServingResponses", "create_responses",
     _of_responses),
)  # fmt: skip
