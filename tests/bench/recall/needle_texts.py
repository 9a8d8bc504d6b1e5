"""What a session keeps of a text that no longer fits, and how each arm uses the same budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np

from ..figures import Figures
from .recall_language import ASK, FACT, FACT_TOKENS, KEYS, NOISE, SAID, VALUES, make_quiz

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


BUDGET: Final = BUDGETS[1]  # 3.6 × less than the text
_DOCUMENTS: Final = 4  # of a prompt that shares them; chosen
_DOCUMENT: Final = 64  # tokens; chosen
_FACTS: Final = 4  # of a document; chosen
_PREAMBLE: Final = 32  # tokens that each reader has before a document; chosen

Words = list[int]


@dataclass(frozen=True, slots=True)
class Case:
    """One question about what was read before."""

    read: list[Words]  # prompts that left their text
    prompt: Words  # repeats text of theirs, and asks
    answer: Words  # what is right


def cases(texts: int, seed: int) -> dict[str, list[Case]]:
    rng, asked = np.random.default_rng(seed), draw(texts, seed)
    return {
        "front": [_landed(each, tail=False) for each in asked],
        "tail": [_landed(each, tail=True) for each in asked],
        "reordered": [_reordered(each, rng) for each in asked],
        "shared": [_shared(rng) for _ in range(texts)],
    }


def serve_cases(serve: Callable[..., dict[str, Any]], texts: int, seed: int) -> dict[str, Any]:
    """Serve all cases; by name, which answers are right with recall and computed."""
    found: dict[str, Any] = {}
    for name, each in cases(texts, seed).items():
        rows = [_served(serve, case) for case in each]
        spliced, computed, of = zip(*rows, strict=True)
        found[name] = {"spliced": spliced, "computed": computed, "share": float(np.mean(of))}
    return found


def add_places(figures: Figures, served: dict[str, Any]) -> None:
    for name, rows in served.items():
        for arm in ("spliced", "computed"):
            right = rows[arm]
            figures.add_share(f"place_{name}_{arm}", sum(right), len(right), "right")
        figures.add(f"place_{name}_share", rows["share"], "of prompt tokens spliced")


def ordered(asked: Asked, tail: bool) -> list[Span]:
    """What is in the budget: sections that name what is asked for behind all others, or before."""
    spans = asked.spans("restored", BUDGET)
    named = [span for span in spans if asked.question[1] in asked.body[slice(*span)]]
    others = [span for span in spans if span not in named]
    return [*others, *named] if tail else [*named, *others]


def _landed(asked: Asked, tail: bool) -> Case:
    words = [asked.body[at] for span in ordered(asked, tail) for at in range(*span)]
    return Case([asked.body], [*words, *asked.question], asked.answer)


def _reordered(asked: Asked, rng: np.random.Generator) -> Case:
    """All sections in another order; what is told last in it is right."""
    spans = [asked.sections[at] for at in rng.permutation(len(asked.sections))]
    words = [asked.body[at] for span in spans for at in range(*span)]
    key = asked.question[1]
    told = [at for at in range(len(words) - FACT_TOKENS + 1) if words[at : at + 2] == [FACT, key]]
    answer = words[told[-1] + 2 : told[-1] + 2 + SAID]
    return Case([asked.body], [*words, *asked.question], answer)


def _shared(rng: np.random.Generator) -> Case:
    """Documents that others read, each by itself and behind words of its reader."""
    keys = rng.permutation(np.arange(*KEYS))[: _DOCUMENTS * _FACTS].reshape(_DOCUMENTS, _FACTS)
    values = rng.integers(*VALUES, size=(_DOCUMENTS, _FACTS, SAID))
    told = [_document(*each, rng) for each in zip(keys, values, strict=True)]
    read = [[*_noise(_PREAMBLE, rng), *document, *_noise(_PREAMBLE, rng)] for document in told]
    order = rng.permutation(_DOCUMENTS)
    which, fact = int(rng.integers(_DOCUMENTS)), int(rng.integers(_FACTS))
    words = [token for number in order for token in told[number]]
    answer = values[which, fact].tolist()
    return Case(read, [*words, ASK, int(keys[which, fact])], answer)


def _document(keys: Any, values: Any, rng: np.random.Generator) -> Words:
    apart = (_DOCUMENT - _FACTS * FACT_TOKENS) // _FACTS
    facts = [[FACT, int(key), *said] for key, said in zip(keys, values.tolist(), strict=True)]
    return [token for fact in facts for token in (*_noise(apart, rng), *fact)]


def _noise(tokens: int, rng: np.random.Generator) -> Words:
    noise: Words = rng.integers(*NOISE, size=tokens).tolist()
    return noise


def _served(serve: Callable[..., dict[str, Any]], case: Case) -> tuple[bool, bool, float]:
    for words in case.read:
        serve(words, True, 1)
    told = serve(case.prompt, True, SAID)
    computed = serve(case.prompt, False, SAID)
    share = told.get("spliced", 0) / len(case.prompt)
    return told["tokens"] == case.answer, computed["tokens"] == case.answer, share
