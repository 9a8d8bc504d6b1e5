"""What marks the chats of one renderer: the learned borders, and a tokenizer of our own."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..layers.border_table import handed_over
from ..layers.marks import marks_of
from ..settings import reads_layers
from .layer_marker import LayerMarker
from .message_places import client_messages
from .rendered_chat import CLIENTS, RenderedChat

if TYPE_CHECKING:
    from vllm.renderers import BaseRenderer

_ATTRIBUTE: Final = "_kvgraph_marks"


class RendererMarks:
    """Marks what a renderer has rendered; from any thread."""

    def __init__(self, renderer: BaseRenderer[Any]) -> None:
        # A tokenizer is for one thread at a time, and vLLM's is in use by its own.
        self._tokenizer: Any = renderer.get_tokenizer()
        with contextlib.suppress(Exception):  # one that cannot be copied is shared
            self._tokenizer = copy.deepcopy(self._tokenizer)
        self._lock = threading.Lock()
        self._marker: LayerMarker | None = None
        transfer = renderer.config.kv_transfer_config
        extra = transfer.kv_connector_extra_config if transfer is not None else {}
        table = handed_over(extra, os.environ) if reads_layers() else None
        if table is not None and table.are_of(str(renderer.config.model_config.model)):
            self._marker, self._proof = LayerMarker(table, self._tokenizer), table.proof

    @staticmethod
    def of(renderer: BaseRenderer[Any]) -> RendererMarks:
        """Those of a renderer, made once."""
        found = getattr(renderer, _ATTRIBUTE, None)
        if found is None:
            found = RendererMarks(renderer)
            setattr(renderer, _ATTRIBUTE, found)
        return found

    def chat(
        self, prompt: Mapping[str, Any], messages: Sequence[Any], extras: Mapping[str, Any]
    ) -> RenderedChat:
        """A prompt's chat.

        Args:
            messages: What was rendered.
            extras: What else the template was given.
        """
        tokens, text = prompt["prompt_token_ids"], prompt.get("prompt")
        marks = None
        if self._marker is not None:
            with self._lock:
                marks = marks_of(self._proof, self._marker.runs(tokens, text, messages, extras))
        own = CLIENTS.get() or client_messages(messages)
        return RenderedChat(marks, own, tokens, text, self._tokenizer)
