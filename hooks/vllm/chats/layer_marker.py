"""Marks the layers of a rendered conversation, where its messages are known."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ....graph.types import SourceLayer
from ..layers.border_table import BorderTable
from ..layers.decoder import decoder
from ..layers.layer_runs import LayerReader, Run
from ..layers.system_sections import SectionSplitter
from ..layers.token_places import TokenPlaces

_REMEMBERED: Final = 256  # system texts whose places are known; chosen
_TELLING: Final = 8  # characters of a text whose place is looked for; chosen
_MOST_TYPED: Final = 64  # strings that name special tokens; more are not looked for. Chosen
_DEEPEST: Final = 32  # of lists in lists in a message; chosen

Messages = Sequence[Mapping[str, Any]]


class LayerMarker:
    """Tells which borders of a prompt the template wrote, and which a message brought.

    Args:
        table: The borders of the model's messages.
        tokenizer: vLLM's.
    """

    def __init__(self, table: BorderTable, tokenizer: Any) -> None:
        self._table = table
        self._decode = decoder(tokenizer)
        self._reader = LayerReader(table)
        self._sections = SectionSplitter(table, self._decode)
        names = {self._decode([token]): token for token in sorted(self._reader.first_tokens)}
        known = sorted(filter(None, names), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, known)) or r"(?!)")
        self._systems: OrderedDict[bytes, _Place] = OrderedDict()

    def runs(
        self, tokens: Sequence[int], text: str | None, messages: Messages, extras: Any = None
    ) -> list[Run]:
        """The layers of a prompt.

        Args:
            text: What was tokenized; None if it was not text.
            messages: What was rendered, in their order.
            extras: What else the template was given: tools, and the like.
        """
        try:
            runs = self._marked(tokens, text, messages, extras)
        except TooDeepError:
            runs = None
        return self._sections.split(tokens, self._reader.stream(tokens) if runs is None else runs)

    def _marked(
        self, tokens: Sequence[int], text: str | None, messages: Messages, extras: Any
    ) -> list[Run] | None:
        """The same, by the messages; None where only the tokens tell."""
        forged = self._forged(tokens, text, messages, extras)
        if forged is None:
            return None
        has_tools = bool(isinstance(extras, Mapping) and extras.get("tools"))
        runs = _system_first(self._reader.marked(tokens, forged, has_tools))
        return runs if self._table.has_system else self._with_system(tokens, messages, runs)

    def _forged(
        self, tokens: Sequence[int], text: str | None, messages: Messages, extras: Any
    ) -> frozenset[int] | None:
        """Where the first token of a border was typed; None where that cannot be told."""
        if self._table.sealed:
            return frozenset()
        if any(self._special.search(each) for each in strings_in(extras)):
            return None
        typed = [each for each in strings_in(list(messages)) if self._special.search(each)]
        if not typed:
            return frozenset()
        if text is None:
            return None
        spans = self._spans(text, messages)
        names = [found.start() for found in self._special.finditer(text)]
        places = [place for place, token in enumerate(tokens) if token in self._reader.first_tokens]
        if spans is None or len(names) != len(places):
            return None
        inside = _inside(spans)
        return frozenset(place for name, place in zip(names, places, strict=True) if inside(name))

    def _spans(self, text: str, messages: Messages) -> list[tuple[int, int]] | None:
        """Where the strings of messages stand in the prompt that name special tokens; None if one
        is not found, or may be the template's: it stands there more often than it was typed."""
        spans, cursor = [], 0
        typed = Counter(s for s in strings_in(list(messages)) if self._special.search(s))
        if typed.total() > _MOST_TYPED:
            return None
        for string, is_content in _by_message(messages):
            if string not in typed and (len(string) < _TELLING or not is_content):
                continue
            found = find_string(text, string, cursor)
            if found is not None:
                cursor = found[1]
            if string in typed:
                if found is None or text.count(text[slice(*found)]) > typed[string]:
                    return None
                spans.append(found)
        return spans

    def _with_system(self, tokens: Sequence[int], messages: Messages, runs: list[Run]) -> list[Run]:
        """``runs`` where the system text is a part of the first user's turn."""
        system = next((each for each in messages if each.get("role") in _SYSTEM), None)
        content = "\n".join(strings_in(system.get("content"))).strip() if system else ""
        turns = [at for at, run in enumerate(runs) if run.layer == SourceLayer.USER_TURN]
        if not content or not turns:
            return runs
        at = turns[-1 if self._table.system_last else 0]
        run = runs[at]
        start, end = self._place_of(tokens[run.start : run.end], content)
        split = [
            Run(run.layer, run.start, run.start + start),
            Run(int(SourceLayer.RULES), run.start + start, run.start + end),
            Run(run.layer, run.start + end, run.end),
        ]
        return [*runs[:at], *(part for part in split if part.start < part.end), *runs[at + 1 :]]

    def _place_of(self, tokens: Sequence[int], content: str) -> tuple[int, int]:
        """The tokens at whose head ``content`` stands; none where it is not found.

        What is remembered of a text counts while the same tokens stand there: a request may bring
        another template, which writes the text elsewhere.
        """
        key = hashlib.blake2b(content.encode("utf-8", "surrogatepass")).digest()
        known = self._systems.get(key)
        if known is None or known.tokens != _digest(tokens[known.start : known.end]):
            text = self._decode(tokens)
            at = text.find(content)
            if at < 0:
                return 0, 0
            places = TokenPlaces(self._decode, tokens)
            if places.length != len(text):
                return 0, 0
            start, end = places.of(at), places.of(at + len(content) - 1) + 1
            known = self._systems[key] = _Place(start, end, _digest(tokens[start:end]))
            if len(self._systems) > _REMEMBERED:
                self._systems.popitem(last=False)
        self._systems.move_to_end(key)
        return known.start, known.end


class _Place(NamedTuple):
    """Where a system text stood in the first user's turn: its tokens' places, and their digest."""

    start: int
    end: int
    tokens: bytes


def _digest(tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes()).digest()


_SYSTEM: Final = ("system", "developer")


def _system_first(runs: list[Run]) -> list[Run]:
    """``runs`` with system texts behind the first answer as context: a conversation may have any
    number of them, and only what stands at its head is what a model is."""
    begun, kept = False, []
    for run in runs:
        begun |= run.layer in (SourceLayer.GENERATION, SourceLayer.TOOL_RESULT)
        late = begun and run.layer < SourceLayer.CAPABILITIES
        kept.append(run._replace(layer=int(SourceLayer.CONTEXT)) if late else run)
    return kept


class TooDeepError(ValueError):
    """A message is nested too deeply to be looked through."""


def strings_in(value: Any, depth: int = 0) -> Iterator[str]:
    """All strings in a message, names of fields of nested objects too, in their order.

    Raises:
        TooDeepError: It is nested more than ``_DEEPEST`` deep.
    """
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        if depth >= _DEEPEST:
            raise TooDeepError(f"nested more than {_DEEPEST} deep")
        fields = value.items() if isinstance(value, Mapping) else ((None, each) for each in value)
        for key, each in fields:
            yield from strings_in(key, depth)
            yield from strings_in(each, depth + 1)


def _by_message(messages: Messages) -> Iterator[tuple[str, bool]]:
    """All strings in messages, and whether each is a content: those stand in a prompt in their
    order. A role or an id may not, while somebody's text names it."""
    for message in messages:
        for name, value in message.items():
            yield from ((string, name == "content") for string in strings_in(value))


def find_string(text: str, string: str, first: int) -> tuple[int, int] | None:
    """Where a string of a message stands in a prompt: as it is, stripped, or as JSON has it."""
    for form in (string, string.strip(), json.dumps(string)[1:-1],
                 json.dumps(string, ensure_ascii=False)[1:-1]):  # fmt: skip
        at = text.find(form, first)
        if at >= 0 and form:
            return at, at + len(form)
    return None


def _inside(spans: list[tuple[int, int]]) -> Callable[[int], bool]:
    """Whether a place is in one of ``spans``, which are disjoint and ascending."""
    starts = [start for start, _ in spans]

    def inside(place: int) -> bool:
        at = bisect_right(starts, place) - 1
        return at >= 0 and place < spans[at][1]

    return inside
