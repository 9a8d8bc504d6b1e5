"""Chats that vLLM renders by a family's template, and the borders that the template taught."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvgraph.graph.types import LAYER_BY_NAME, SourceLayer
from kvgraph.hooks.requests.borders import SECTIONS, BorderTable
from kvgraph.hooks.vllm.api.learning import learn_borders

from .families import Family, family_config, write_family

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Told(NamedTuple):
    """A text between two words that only it has."""

    layer: SourceLayer  # what it is
    first: str
    last: str
    head: bool = False  # whether it stands in the system text


class MadeChat(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    told: list[Told]


SECTION_LAYERS: Final = {line: int(LAYER_BY_NAME[name]) for line, name in SECTIONS.items()}


class FamilyChats:
    def __init__(self, family: Family, directory: Path) -> None:
        from vllm.renderers import renderer_from_config

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.config: VllmConfig = family_config(family, write_family(family, directory))
        self.table: BorderTable | None = learn_borders(self.config, SECTION_LAYERS)
        self._renderer = renderer_from_config(self.config)
        self.tokenizer = self._renderer.get_tokenizer()

    def close(self) -> None:
        self._renderer.shutdown()

    def rendered(self, chat: MadeChat) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """The parsed conversation, its prompt, and what else the template was given."""
        from vllm.renderers import ChatParams

        is_text = type(self._renderer).__name__ != "MistralRenderer"
        extras = {"tools": chat.tools, "tokenize": not is_text, "add_generation_prompt": True}
        params = ChatParams(chat_template_kwargs=extras)
        conversations, prompts = self._renderer.render_chat([chat.messages], params)
        return conversations[0], prompts[0], {"tools": chat.tools}
