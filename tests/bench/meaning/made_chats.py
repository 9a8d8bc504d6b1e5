"""Conversations as clients send them, each text with a word at both ends that no other has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from kvgraph.graph.types import SourceLayer

from .family_models import corpus

_SECTIONS: Final = (
    ("[AXIOMS]", SourceLayer.AXIOMS), ("[IDENTITY]", SourceLayer.IDENTITY),
    ("[RULES]", SourceLayer.RULES), ("[CONTEXT]", SourceLayer.CONTEXT),
    ("[MEMORIES]", SourceLayer.MEMORIES), ("[AFFECT]", SourceLayer.AFFECT),
)  # fmt: skip
_TOOLS: Final = ("bash", "search", "read_file")
_TURNS: Final = (1, 2, 4)


class Told(NamedTuple):
    """A text between two words that only it has.

    Attributes:
        layer: What it is.
        head: Whether it stands in the system text.
    """

    layer: SourceLayer
    first: str
    last: str
    head: bool = False


class MadeChat(NamedTuple):
    """A conversation, and what its texts are."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    told: list[Told]


class ChatMaker:
    """Makes conversations of every kind.

    Args:
        seed: Of the texts.
        system: Whether some have a system text.
    """

    def __init__(self, seed: str, system: bool = True) -> None:
        self._rng = random.Random(seed)
        self._texts = [" ".join(text.split()) for text in corpus()]
        self._words = 0
        self._told: list[Told] = []
        self._has_system = system

    def chats(self, count: int) -> Iterator[MadeChat]:
        """``count`` conversations."""
        for number in range(count):
            self._told = []
            messages = self._system(number) if self._has_system and number % 4 else []
            has_tools = number % 2 == 1
            tools = self._schemas() if has_tools else None
            for _ in range(self._rng.choice(_TURNS)):
                messages += self._turn(has_tools and self._rng.random() < 0.7)
            messages.append({"role": "user", "content": self._text(SourceLayer.USER_TURN)})
            yield MadeChat(messages, tools, list(self._told))

    def _system(self, number: int) -> list[dict[str, Any]]:
        if number % 3:
            return [{"role": "system", "content": self._text(SourceLayer.RULES, head=True)}]
        chosen = self._rng.sample(_SECTIONS, 3)
        parts = [f"{line}\n{self._text(layer, head=True)}" for line, layer in chosen]
        lead = self._text(SourceLayer.RULES, head=True)
        return [{"role": "system", "content": "\n\n".join([lead, *parts])}]

    def _turn(self, calls: bool) -> list[dict[str, Any]]:
        turn: list[dict[str, Any]] = [
            {"role": "user", "content": self._text(SourceLayer.USER_TURN)}
        ]
        if calls:
            name = self._rng.choice(_TOOLS)
            function = {"name": name, "arguments": f'{{"path": "{self._word()}"}}'}
            call_id = f"call{self._rng.randrange(10_000, 99_999)}"
            call = {"id": call_id, "type": "function", "function": function}
            result = self._text(SourceLayer.TOOL_RESULT)
            turn.append({"role": "assistant", "content": None, "tool_calls": [call]})
            turn.append({"role": "tool", "tool_call_id": call_id, "name": name, "content": result})
        turn.append({"role": "assistant", "content": self._text(SourceLayer.GENERATION)})
        return turn

    def _schemas(self) -> list[dict[str, Any]]:
        """Tools, each described by a text."""
        properties = {"path": {"type": "string"}}
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": self._text(SourceLayer.CAPABILITIES, head=True),
                    "parameters": {"type": "object", "properties": properties},
                },
            }
            for name in _TOOLS
        ]

    def _text(self, layer: SourceLayer, head: bool = False) -> str:
        text = self._rng.choice(self._texts)
        start = self._rng.randrange(max(1, len(text) - 500))
        body = text[start : start + self._rng.randint(60, 500)]
        first, last = self._word(), self._word()
        self._told.append(Told(layer, first, last, head))
        return f"{first} {body} {last}"

    def _word(self) -> str:
        self._words += 1
        return f"Zw{self._words:05d}z"
