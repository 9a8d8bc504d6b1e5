"""Scripted sessions: the same requests, in the same order, for every arm.

Prompts are token ids of stated source layers, and the assistant's turns are scripted, so that two
arms differ by nothing but their caches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from kvgraph.graph.types import SourceLayer

BLOCK: Final = 32  # tokens of a KV block in benches; the CPU engine takes multiples of 32

SECONDS_PER_REQUEST: Final = 0.6  # nominal service time: only the script's order depends on it


@dataclass(frozen=True, slots=True)
class Span:
    layer: SourceLayer
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    session: str
    number: int
    prompt: tuple[Span, ...]
    max_tokens: int
    pause_s: float  # seconds between the end of the session's turn before and this one's start
    # what the caller tells the engine beside the segments; None: it tells nothing
    hints: dict[str, Any] | None

    @property
    def token_ids(self) -> list[int]:
        return [token for span in self.prompt for token in span.tokens]

    @property
    def name(self) -> str:
        return f"{self.session}/{self.number}"

    def segments(self) -> list[dict[str, Any]]:
        """The prompt's layers as token ranges, in the form that ``kv_transfer_params`` takes."""
        found, start = [], 0
        for span in self.prompt:
            end = start + len(span.tokens)
            found.append({"layer": span.layer.name.lower(), "start": start, "end": end})
            start = end
        return found

    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What stock vLLM ignores and kvgraph reads; None for a caller who knows neither."""
        if self.hints is None:
            return None
        return {"kvgraph": {"segments": self.segments(), **self.hints}}


@dataclass(frozen=True, slots=True)
class Session:
    name: str
    starts_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    sessions: tuple[Session, ...]

    def in_order(self) -> list[Turn]:
        """Every request in the order of the script's clock, each nominally served in turn."""
        return list(_by_script_time(self.sessions))

    @property
    def prompt_tokens(self) -> int:
        return sum(len(turn.token_ids) for session in self.sessions for turn in session.turns)


@dataclass
class Writer:
    random: np.random.Generator
    vocabulary: int

    def span(self, layer: SourceLayer, low: int, high: int | None = None) -> Span:
        """Between ``low`` and ``high`` tokens; ids stay clear of the special ones at both ends."""
        length = low if high is None else int(self.random.integers(low, high + 1))
        first, last = self.vocabulary // 8, self.vocabulary * 7 // 8
        return Span(layer, tuple(int(t) for t in self.random.integers(first, last, length)))


def system_prompts(writer: Writer, kinds: int) -> list[tuple[Span, ...]]:
    """What each kind of agent starts with: common axioms, then its own charter and tools."""
    axioms = writer.span(SourceLayer.AXIOMS, 2 * BLOCK)
    return [
        (
            axioms,
            writer.span(SourceLayer.IDENTITY, 2 * BLOCK),
            writer.span(SourceLayer.RULES, 4 * BLOCK),
            writer.span(SourceLayer.CAPABILITIES, 8 * BLOCK),
        )
        for _ in range(kinds)
    ]


@dataclass(order=True)
class _Due:
    at_s: float
    rank: int
    session: Session = field(compare=False)
    number: int = field(compare=False, default=0)


def _by_script_time(sessions: tuple[Session, ...]) -> Iterator[Turn]:
    due = [_Due(session.starts_s, rank, session) for rank, session in enumerate(sessions)]
    heapq.heapify(due)
    while due:
        entry = heapq.heappop(due)
        yield entry.session.turns[entry.number]
        if entry.number + 1 < len(entry.session.turns):
            pause = entry.session.turns[entry.number + 1].pause_s
            at_s = entry.at_s + SECONDS_PER_REQUEST + pause
            heapq.heappush(due, replace(entry, at_s=at_s, number=entry.number + 1))
