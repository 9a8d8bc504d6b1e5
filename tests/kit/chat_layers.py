"""Which layer each token of a conversation is taken for.

The way is the engine's: the borders are learned with vLLM's renderer, vLLM renders the chats, and
what the API process marks, or the tokens alone, are read as for a request's start.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvgraph.graph.types import LAYER_NAMES, SourceLayer
from kvgraph.hooks.requests.borders import BorderTable, LayerReader, Run
from kvgraph.hooks.requests.messages import LayerMarker
from kvgraph.hooks.requests.sections import SectionSplitter
from kvgraph_bench.meaning.families import Family, corpus
from kvgraph_bench.meaning.family_chats import FamilyChats, MadeChat, Told

_SECTIONS: Final = (
    ("[AXIOMS]", SourceLayer.AXIOMS), ("[IDENTITY]", SourceLayer.IDENTITY),
    ("[RULES]", SourceLayer.RULES), ("[CONTEXT]", SourceLayer.CONTEXT),
    ("[MEMORIES]", SourceLayer.MEMORIES), ("[AFFECT]", SourceLayer.AFFECT),
)  # fmt: skip
_TOOLS: Final = ("bash", "search", "read_file")
_TURNS: Final = (1, 2, 4)


class ChatMaker:
    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)
        self._texts = [" ".join(text.split()) for text in corpus()]
        self._words = 0
        self._told: list[Told] = []

    def chats(self, count: int) -> Iterator[MadeChat]:
        for number in range(count):
            self._told = []
            messages = self._system(number) if number % 4 else []
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


@dataclass
class Labelled:
    """How many tokens of one family's conversations were taken for what they are."""

    tokens: int = 0
    right: int = 0
    # tokens by what they are and what they were taken for
    wrong: Counter[str] = field(default_factory=Counter)

    @property
    def accuracy(self) -> float:
        return self.right / max(1, self.tokens)

    def add(self, truth: int, taken: int | None) -> None:
        self.tokens += 1
        self.right += truth == taken
        if truth != taken:
            name = "nothing" if taken is None else LAYER_NAMES[taken]
            self.wrong[f"{LAYER_NAMES[truth]} for {name}"] += 1


def judge_layers(family: Family, directory: Path, count: int, seed: int) -> dict[str, Labelled]:
    """Read ``count`` conversations, as marked chats and as streams of tokens."""
    with contextlib.closing(FamilyChats(family, directory)) as chats:
        judged = {"chat": Labelled(), "stream": Labelled()}
        if chats.table is not None:
            for chat in ChatMaker(f"{seed}/{family.name}").chats(count):
                _judge(chats, chats.table, chat, judged)
        return judged


def _judge(
    chats: FamilyChats, table: BorderTable, chat: MadeChat, judged: dict[str, Labelled]
) -> None:
    from kvgraph.hooks.requests.borders import decoder

    decode = decoder(chats.tokenizer)
    try:
        messages, prompt, extras = chats.rendered(chat)
    except Exception:  # some templates want other calls, or no system text
        return
    tokens = prompt["prompt_token_ids"]
    marked = LayerMarker(table, chats.tokenizer).runs(
        tokens, prompt.get("prompt"), messages, extras
    )
    streamed = SectionSplitter(table, decode).split(tokens, LayerReader(table).stream(tokens))
    ends = [len(decode(tokens[: count + 1])) for count in range(len(tokens))]
    text = decode(tokens)
    first_user = text.find(next(t for t in chat.told if t.layer is SourceLayer.USER_TURN).first)
    for name, runs in (("chat", marked), ("stream", streamed)):
        taken = painted(runs, len(tokens))
        for truth, place in _truths(chat.told, text, ends):
            seen = truth if name == "chat" else _seen(truth, table, place, first_user, ends, text)
            judged[name].add(int(seen), taken[place])


def painted(runs: Sequence[Run], count: int) -> list[int | None]:
    """The layer of each token; None where nobody says."""
    taken: list[int | None] = [None] * count
    for run in runs:
        taken[run.start : run.end] = [run.layer] * (min(run.end, count) - run.start)
    return taken


def _truths(
    told: Sequence[Told], text: str, ends: Sequence[int]
) -> Iterator[tuple[SourceLayer, int]]:
    """Every token that lies in one of the texts, and what that text is."""
    for each in told:
        first, last = text.find(each.first), text.find(each.last)
        if first < 0 or last < 0:
            continue
        stop = last + len(each.last)
        for place, end in enumerate(ends):
            begin = ends[place - 1] if place else 0
            if first <= begin and end <= stop and begin < end:
                yield each.layer, place


def _seen(
    truth: SourceLayer,
    table: BorderTable,
    place: int,
    first_user: int,
    ends: Sequence[int],
    text: str,
) -> SourceLayer:
    """What a text is, as far as tokens can show it: a system text that is a part of a user's turn
    is that, and so are tools that are described behind the first such turn.
    """
    of_head = truth < SourceLayer.TOOL_RESULT
    if of_head and truth is not SourceLayer.CAPABILITIES and not table.has_system:
        return SourceLayer.USER_TURN
    if of_head and ends[place] > first_user:
        return SourceLayer.USER_TURN
    return truth
