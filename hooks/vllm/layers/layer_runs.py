"""Reads a prompt's layers off the borders of its messages."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from ....graph.types import SourceLayer
from .border_table import Border, BorderTable

_SLICE: Final = 4096  # tokens that are looked at before other threads may run; chosen
USER: Final = int(SourceLayer.USER_TURN)


class Run(NamedTuple):
    """Tokens ``[start, end)`` of one layer."""

    layer: int
    start: int
    end: int


class Found(NamedTuple):
    """A border at ``start``; what stands from ``end`` on is of its layer."""

    layer: int
    start: int
    end: int


class LayerReader:
    """Finds borders among tokens.

    Args:
        table: The borders of the model's messages.
    """

    def __init__(self, table: BorderTable) -> None:
        self._strong = _by_first_token(table.borders)
        self._inner = _by_first_token(table.inner)
        self.first_tokens = frozenset(self._strong)

    def stream(self, tokens: Sequence[int], known: int = 0) -> list[Run]:
        """The layers of a prompt of which nothing but its tokens is known.

        Whoever writes a message can write borders, too: a tokenizer turns typed names of special
        tokens into these tokens. So what a border says counts in full before the first message of
        a user only, and no more than as part of a conversation behind it.

        Args:
            known: Tokens whose layers were told before; all before the first message of a user is
                told again.
        """
        head = self._head(tokens)
        runs = _runs(head.found, head.end)
        first = max(head.end, known)
        if first < len(tokens):
            before = self._last_before(tokens, head.end, first)
            found = [Found(before, first, first), *self.strong(tokens, first)]
            runs += _runs([_humbled(each) for each in found], len(tokens))
        return runs

    def marked(self, tokens: Sequence[int], forged: Collection[int], tools: bool) -> list[Run]:
        """The layers of a prompt whose messages are known.

        Args:
            forged: Where a border's first token was typed by whoever wrote a message.
            tools: Whether the prompt describes tools: the first text that does so is theirs.
        """
        real = (each for each in self.strong(tokens) if each.start not in forged)
        found = list(_without_mentions(real))
        if tools:
            found += self._of_tools(tokens, found)
        return _runs(sorted(found, key=lambda each: each.start), len(tokens))

    def strong(self, tokens: Sequence[int], first: int = 0) -> Iterator[Found]:
        """The borders with special tokens from ``first`` on, in their order."""
        end = first
        for place in _places(tokens, self._strong, first):
            found = _longest(tokens, place, self._strong) if place >= end else None
            if found is not None:
                end = found.end
                yield found

    def _head(self, tokens: Sequence[int]) -> _Head:
        """What stands before the first message of a user."""
        found: list[Found] = []
        for each in _without_mentions(self.strong(tokens)):
            if each.layer >= SourceLayer.TOOL_RESULT:
                return self._with_inner(tokens, found, each.start)
            found.append(each)
        return self._with_inner(tokens, found, found[-1].start if found else 0)

    def _with_inner(self, tokens: Sequence[int], found: list[Found], end: int) -> _Head:
        found = [each for each in found if each.start < end]
        if found:
            found += self._text_borders(tokens, found[0].end, end)
        return _Head(sorted(found, key=lambda each: each.start), end)

    def _of_tools(self, tokens: Sequence[int], strong: Sequence[Found]) -> list[Found]:
        """The first text that begins a description of tools, where no special token does, and the
        next that ends it: before the first user's turn, or in it."""
        user = next((each.start for each in strong if each.layer == USER), len(tokens))
        begun = next((each for each in strong if each.layer == SourceLayer.CAPABILITIES), None)
        found: list[Found] = []
        for each in self._text_borders(tokens, begun.end if begun else 0, len(tokens)):
            if begun is None and each.layer == SourceLayer.CAPABILITIES:
                begun = each
                found.append(each)
            elif begun is not None and each.layer == USER:
                return [*found, each] if begun.start > user else found
            elif begun is not None and each.layer != SourceLayer.CAPABILITIES:
                return [*found, each] if each.start < user else found
        return found

    def _text_borders(self, tokens: Sequence[int], first: int, end: int) -> Iterator[Found]:
        for place in _places(tokens[:end], self._inner, first):
            found = _longest(tokens, place, self._inner)
            if found is not None:
                yield found

    def _last_before(self, tokens: Sequence[int], first: int, end: int) -> int:
        """The layer of the last border in ``tokens[first:end]``; a user's if there is none."""
        last: int | None = None
        while end > first:
            start = max(first, end - _SLICE)
            for each in self.strong(tokens, start):
                if each.start >= end:
                    break
                last = each.layer
            if last is not None:
                return last
            end = start
        return USER


class _Head(NamedTuple):
    found: list[Found]
    end: int


_Borders = dict[int, list[Border]]


def _without_mentions(found: Iterable[Found]) -> Iterator[Found]:
    """Borders without those of answers in what stands before the first message of a user: there a
    template says how answers are written."""
    head, begun = False, False
    for each in found:
        begun |= each.layer in (USER, SourceLayer.TOOL_RESULT)
        if head and not begun and each.layer == SourceLayer.GENERATION:
            continue
        head |= each.layer < SourceLayer.TOOL_RESULT
        yield each


def _by_first_token(borders: Sequence[Border]) -> _Borders:
    """The borders by their first token, the longest first."""
    found: _Borders = {}
    for border in sorted(borders, key=lambda each: -len(each.tokens)):
        found.setdefault(border.tokens[0], []).append(border)
    return found


def _places(tokens: Sequence[int], borders: _Borders, first: int) -> Iterator[int]:
    """Where a border may begin, from ``first`` on; other threads run in between."""
    wanted = np.fromiter(borders, dtype=np.int64, count=len(borders))
    for start in range(first, len(tokens) if len(wanted) else 0, _SLICE):
        part = np.asarray(tokens[start : start + _SLICE], dtype=np.int64)
        yield from (start + np.flatnonzero(np.isin(part, wanted))).tolist()


def _longest(tokens: Sequence[int], place: int, borders: _Borders) -> Found | None:
    """The longest border that begins at ``place``."""
    for border in borders[tokens[place]]:
        end = place + len(border.tokens)
        if tuple(tokens[place:end]) == border.tokens:
            return Found(border.layer, place, end)
    return None


def _humbled(found: Found) -> Found:
    """A border behind the first message of a user: it raises nothing above a tool's result."""
    return found if found.layer >= SourceLayer.TOOL_RESULT else found._replace(layer=USER)


def _runs(found: Sequence[Found], end: int) -> list[Run]:
    """What begins with each border, up to the next; a border belongs to what it begins."""
    starts = [each.start for each in [*found, Found(USER, end, end)][1:]]
    layered = [(each.layer, each.start, stop) for each, stop in zip(found, starts, strict=True)]
    runs: list[Run] = []
    for layer, start, stop in layered:
        if runs and runs[-1].layer == layer:
            runs[-1] = runs[-1]._replace(end=stop)
        elif stop > start:
            runs.append(Run(layer, start, stop))
    return runs
