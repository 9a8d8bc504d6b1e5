"""What a session keeps of a text that no longer fits, and how each arm uses the same budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from .recall_language import FACT, FACT_TOKENS, SAID, make_quiz

LENGTH: Final = 512  # as the model was taught
FACTS: Final = 32
BUDGETS: Final = (254, 141, 63)  # tokens of context: 2, 3.6 and 8 × less than the text's 507
ARMS: Final = ("window", "sinks", "discard", "breadcrumb", "restored")
_SECTION: Final = 32  # tokens of the shortest; chosen: the least that the index finds at any place
_SINKS: Final = 4  # as StreamingLLM keeps
_CRUMBS: Final = 0.25  # of a budget that names of what was dropped may take; chosen

Span = tuple[int, int]  # first token of the text, and the one behind the last


@dataclass(frozen=True, slots=True)
class Asked:
    body: list[int]  # the text: noise, and facts in it
    question: list[int]  # what is asked: ``ASK key``
    answer: list[int]  # what the key was told to be last

    @property
    def sections(self) -> list[Span]:
        """The text in parts that begin with a fact, as a session's messages tell whole things."""
        starts = [0]
        for at, token in enumerate(self.body):
            fits = at - starts[-1] >= _SECTION and len(self.body) - at >= _SECTION
            if token == FACT and fits:
                starts.append(at)
        return list(pairwise([*starts, len(self.body)]))

    def context(self, arm: str, budget: int) -> list[int]:
        """What ``arm`` lets the model read: ``budget`` tokens at most."""
        return [
            *self._named(arm, budget),
            *(self.body[at] for span in self.spans(arm, budget) for at in range(*span)),
        ]

    def spans(self, arm: str, budget: int) -> list[Span]:
        """What ``arm`` keeps of the text, in its order."""
        end = len(self.body)
        match arm:
            case "full":
                return [(0, end)]
            case "window":
                return [(end - budget, end)]
            case "sinks":
                return [(0, _SINKS), (end - budget + _SINKS, end)]
            case "breadcrumb":
                return self._newest(budget - int(_CRUMBS * budget), [])
            case "restored":
                return self._newest(budget, self._recalled(budget))
        return self._newest(budget, [])

    def _newest(self, budget: int, kept: list[Span]) -> list[Span]:
        """``kept``, and the newest other sections as long as there is room; whole ones only."""
        room, kept = budget - _size(kept), list(kept)
        for span in reversed(self.sections):
            if span in kept:
                continue
            if _size([span]) > room:
                break
            kept.append(span)
            room -= _size([span])
        return sorted(kept)

    def _recalled(self, room: int) -> list[Span]:
        """Sections that name what is asked for, the newest first, as long as there is room."""
        kept: list[Span] = []
        for span in reversed(self.sections):
            named = self.question[1] in self.body[slice(*span)]
            if named and _size([*kept, span]) <= room:
                kept.append(span)
        return kept

    def _named(self, arm: str, budget: int) -> Iterator[int]:
        """A breadcrumb: the keys of facts that were dropped, the newest last."""
        if arm != "breadcrumb":
            return iter(())
        first = next(iter(self.spans(arm, budget)), (len(self.body), 0))[0]
        told = [self.body[at + 1] for at in range(first) if self.body[at] == FACT]
        return iter(told[-int(_CRUMBS * budget) :])


def draw(texts: int, seed: int) -> list[Asked]:
    """Texts of ``LENGTH`` tokens with one question each."""
    quiz = make_quiz(texts, LENGTH, FACTS, 1, np.random.default_rng(seed))
    body, said = LENGTH - FACT_TOKENS, LENGTH - SAID
    return [Asked(row[:body], row[body:said], row[said:]) for row in quiz.tolist()]


def _size(spans: Sequence[Span]) -> int:
    return sum(end - first for first, end in spans)
