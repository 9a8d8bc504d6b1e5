"""Marks chats in the API process, so that the engine learns each message's layer."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ...requests.borders import MARKS_KEY, marks_of
from ...requests.hints import KEY
from ...requests.messages import (
    CHAT_KEY,
    CLIENTS,
    ClientMessage,
    LayerMarker,
    RenderedChat,
    client_messages,
    resolve_message_hints,
    take_hints,
)
from ...threads import Once
from ..patching import Method, patch
from ..reading import engine_table

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer, ChatParams
    from vllm.v1.engine import EngineCoreRequest

# Some serving classes convert a client's messages before rendering, but hints refer to the original
# messages. Anthropic's ``cache_control`` is read from the raw body, because vLLM's protocol drops
# it.

logger = logging.getLogger(__name__)

_once = Once(logger)
_TTL_S: Final = {"5m": 300.0, "1h": 3600.0}
"""Seconds that a cache breakpoint keeps the text before it; the first is Anthropic's default."""
_MOST: Final = 4  # breakpoints of a request, as Anthropic allows


def note_clients() -> None:
    """Wrap vLLM's serving classes that convert a client's messages, to record the original ones.

    Called with every chat: a server loads these classes before it renders its first chat; other
    processes never load them.
    """
    for module, name, method, note in _SURFACES:
        if (loaded := sys.modules.get(module)) is not None:
            patch(getattr(loaded, name), method, partial(_noted, note))


def _noted(note: Any, original: Method) -> Method:
    async def noted(self: Any, request: Any, raw_request: Any = None, *rest: Any) -> Any:
        token = None
        try:
            token = CLIENTS.set(await note(request, raw_request))
        except Exception as error:  # a malformed request is for vLLM to refuse
            _once.warn(
                "note",
                "kvgraph: a client's messages are not read (%s); ignored",
                type(error).__name__,
            )
        try:
            return await original(self, request, raw_request, *rest)
        finally:
            if token is not None:
                CLIENTS.reset(token)

    return noted


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
    transfer = dict(request.kv_transfer_params or {})
    stated = transfer.get(KEY)
    stated = dict(stated) if isinstance(stated, dict) else {}
    listed = stated.get("messages")
    stated["messages"] = [*hints, *(listed if isinstance(listed, list) else ())]
    request.kv_transfer_params = {**transfer, KEY: stated}


def _breakpoints(body: Mapping[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Yield hints that keep everything up to the last breakpoint, for as long as it asks."""
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
    """Yield the seconds that each breakpoint in a part of the body asks for."""
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


_ATTRIBUTE: Final = "_kvgraph_marks"


class RendererMarks:
    """Marks the prompts that one renderer produces; may be used from any thread."""

    def __init__(self, renderer: BaseRenderer[Any]) -> None:
        # A tokenizer is for one thread at a time, and vLLM's is in use by its own.
        self._tokenizer: Any = renderer.get_tokenizer()
        with contextlib.suppress(Exception):  # one that cannot be copied is shared
            self._tokenizer = copy.deepcopy(self._tokenizer)
        self._lock = threading.Lock()
        self._marker: LayerMarker | None = None
        if (table := engine_table(renderer.config)) is not None:
            self._marker, self._proof = LayerMarker(table, self._tokenizer), table.proof

    @staticmethod
    def of(renderer: BaseRenderer[Any]) -> RendererMarks:
        found = getattr(renderer, _ATTRIBUTE, None)
        if found is None:
            found = RendererMarks(renderer)
            setattr(renderer, _ATTRIBUTE, found)
        return found

    def chat(
        self, prompt: Mapping[str, Any], messages: Sequence[Any], extras: Mapping[str, Any]
    ) -> RenderedChat:
        tokens, text = prompt["prompt_token_ids"], prompt.get("prompt")
        marks = None
        if self._marker is not None:
            with self._lock:
                marks = marks_of(self._proof, self._marker.runs(tokens, text, messages, extras))
        noted = CLIENTS.get()
        own = partial(client_messages, messages) if noted is None else lambda: noted
        return RenderedChat(marks, own, tokens, text, self._tokenizer)


_LONG: Final = 16_384  # longer prompts, in tokens, are marked on another thread; chosen: 0.5 ms


def mark_chats() -> None:
    """Wrap vLLM's renderers and input processor to carry marks. Raises AttributeError."""
    renderer = import_module("vllm.renderers.base").BaseRenderer
    processor = import_module("vllm.v1.engine.input_processor").InputProcessor
    patch(renderer, "render_chat", _marked)
    patch(renderer, "render_chat_async", _marked_async)
    patch(processor, "process_inputs", _handing_over)


def _marked(original: Method) -> Method:
    def render_chat(self: Any, conversations: Any, chat_params: ChatParams, *rest: Any,
                    **named: Any) -> Any:  # fmt: skip
        rendered = original(self, conversations, chat_params, *rest, **named)
        _mark_all(self, rendered, chat_params)
        return rendered

    return render_chat


def _marked_async(original: Method) -> Method:
    async def render_chat_async(self: Any, conversations: Any, chat_params: ChatParams,
                                *rest: Any, **named: Any) -> Any:  # fmt: skip
        rendered = await original(self, conversations, chat_params, *rest, **named)
        if any(len(each.get("prompt_token_ids") or ()) > _LONG for each in rendered[1]):
            await asyncio.to_thread(_mark_all, self, rendered, chat_params)
        else:
            _mark_all(self, rendered, chat_params)
        return rendered

    return render_chat_async


def _handing_over(original: Method) -> Method:
    def process_inputs(self: Any, request_id: str, prompt: Any, *rest: Any, **named: Any) -> Any:
        request = original(self, request_id, prompt, *rest, **named)
        try:
            hand_over(request, prompt)
        except Exception as error:
            _once.warn("hand over", "kvgraph: a chat's layers are not told (%s)", _kind(error))
        return request

    return process_inputs


def hand_over(request: EngineCoreRequest, prompt: Any) -> None:
    """Put a rendered prompt's marks and hints where the engine's scheduler finds them. The client's
    own objects are not changed, because several requests may share them.
    """
    params = request.sampling_params
    if params is None:
        return
    extra = dict(params.extra_args or {})
    chat = prompt.get(CHAT_KEY) if isinstance(prompt, Mapping) else None
    transfer: dict[str, Any] = {}
    if stated := take_hints(extra, _once):
        transfer[KEY] = resolve_message_hints(stated, chat, _once)
    if chat is not None and chat.marks is not None:
        transfer[MARKS_KEY] = chat.marks
    if transfer:
        extra["kv_transfer_params"] = {**(extra.get("kv_transfer_params") or {}), **transfer}
    params.extra_args = extra or None


def _mark_all(
    renderer: Any, rendered: tuple[Sequence[Any], Sequence[Any]], params: ChatParams
) -> None:
    """Attach each rendered conversation's layers to its prompt; never raises."""
    try:
        note_clients()
        marks = RendererMarks.of(renderer)
        for messages, prompt in zip(*rendered, strict=True):
            if prompt.get("prompt_token_ids"):
                prompt[CHAT_KEY] = marks.chat(prompt, messages, params.chat_template_kwargs)
    except Exception as error:  # no content may make a client's request fail
        _once.warn("mark", "kvgraph: a chat's layers are not read (%s)", _kind(error))


def _kind(error: Exception) -> str:
    return type(error).__name__
