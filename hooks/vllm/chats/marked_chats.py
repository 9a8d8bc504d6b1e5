"""Marks chats on their way through the API process: the engine learns each message's layer."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from ...once import Once
from ..hints.tags import KEY
from ..layers.marks import MARKS_KEY
from .client_surfaces import note_clients
from .message_hints import take_hints
from .rendered_chat import CHAT_KEY, resolved
from .renderer_marks import RendererMarks

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer, ChatParams
    from vllm.v1.engine import EngineCoreRequest

logger = logging.getLogger(__name__)

_MARK: Final = "_kvgraph_wrapped"
_LONG: Final = 4096  # tokens of a prompt that is marked beside the API's loop; chosen
_once = Once(logger)


def mark_chats() -> None:
    """From now on, mark what renderers make of messages, and hand the marks to the engine.

    Raises:
        AttributeError: This vLLM has no such renderers.
    """
    renderer = import_module("vllm.renderers.base").BaseRenderer
    processor = import_module("vllm.v1.engine.input_processor").InputProcessor
    if hasattr(renderer.render_chat_async, _MARK):
        return
    _wrap_rendering(renderer)
    _wrap_processing(processor)


def _wrap_rendering(kind: type[BaseRenderer[Any]]) -> None:
    render, render_async = kind.render_chat, kind.render_chat_async

    @functools.wraps(render)
    def render_chat(self: Any, conversations: Any, chat_params: ChatParams, *rest: Any,
                    **named: Any) -> Any:  # fmt: skip
        rendered = render(self, conversations, chat_params, *rest, **named)
        _mark_all(self, rendered, chat_params)
        return rendered

    @functools.wraps(render_async)
    async def render_chat_async(self: Any, conversations: Any, chat_params: ChatParams,
                                *rest: Any, **named: Any) -> Any:  # fmt: skip
        rendered = await render_async(self, conversations, chat_params, *rest, **named)
        if any(len(each.get("prompt_token_ids") or ()) > _LONG for each in rendered[1]):
            await asyncio.to_thread(_mark_all, self, rendered, chat_params)
        else:
            _mark_all(self, rendered, chat_params)
        return rendered

    setattr(render_chat_async, _MARK, True)
    kind.render_chat = render_chat
    kind.render_chat_async = render_chat_async


def _wrap_processing(kind: Any) -> None:
    process = kind.process_inputs

    @functools.wraps(process)
    def process_inputs(self: Any, request_id: str, prompt: Any, *rest: Any, **named: Any) -> Any:
        request = process(self, request_id, prompt, *rest, **named)
        try:
            hand_over(request, prompt)
        except Exception as error:
            _once.warn("hand over", "kvgraph: a chat's layers are not told (%s)", _kind(error))
        return request

    kind.process_inputs = process_inputs


def hand_over(request: EngineCoreRequest, prompt: Any) -> None:
    """Put the marks of a rendered prompt where the engine's scheduler finds them.

    The client's own objects are not changed: several requests may share them.
    """
    params = request.sampling_params
    if params is None:
        return
    extra = dict(params.extra_args or {})
    chat = prompt.get(CHAT_KEY) if isinstance(prompt, Mapping) else None
    transfer: dict[str, Any] = {}
    if said := take_hints(extra, _once):
        transfer[KEY] = resolved(said, chat, _once)
    if chat is not None and chat.marks is not None:
        transfer[MARKS_KEY] = chat.marks
    if transfer:
        extra["kv_transfer_params"] = {**(extra.get("kv_transfer_params") or {}), **transfer}
    params.extra_args = extra or None


def _mark_all(
    renderer: Any, rendered: tuple[Sequence[Any], Sequence[Any]], params: ChatParams
) -> None:
    """Note the layers of each rendered conversation beside its tokens; never raises."""
    try:
        note_clients()
        marks = RendererMarks.of(renderer)
        for messages, prompt in zip(*rendered, strict=True):
            if prompt.get("prompt_token_ids"):
                prompt[CHAT_KEY] = marks.chat(prompt, messages, params.chat_template_kwargs)
    except Exception as error:  # a client's request must go on whatever it contains
        _once.warn("mark", "kvgraph: a chat's layers are not read (%s)", _kind(error))


def _kind(error: Exception) -> str:
    return type(error).__name__
