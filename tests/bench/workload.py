"""A scripted afternoon of agents: the same requests, in the same order, for every arm.

Agents of three kinds share the company's axioms; each kind has its identity, rules and tools.
A session starts with its context and memories, takes a few turns with tool calls between them,
and ends; some sessions compact their history half way. Beside them, documents are pasted once
and never seen again. Prompts are token ids, and the assistant's turns are scripted, so that two
arms differ by nothing but their caches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from ..graph.types import SourceLayer

BLOCK: Final = 32
"""Tokens of a KV block in the demo; the CPU engine takes multiples of 32."""

SECONDS_PER_REQUEST: Final = 0.6
"""Nominal service time: only the script's order depends on it."""


@dataclass(frozen=True, slots=True)
class Span:
    """A run of tokens of one source layer."""

    layer: SourceLayer
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        pause_s: Seconds between the end of the session's turn before and this one's start.
        hints: What the caller tells the engine beside the segments; None: it tells nothing.
    """

    session: str
    number: int
    prompt: tuple[Span, ...]
    max_tokens: int
    pause_s: float
    hints: dict[str, Any] | None

    @property
    def token_ids(self) -> list[int]:
        """The prompt."""
        return [token for span in self.prompt for token in span.tokens]

    @property
    def name(self) -> str:
        """Names the request across arms and passes."""
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
    """The turns of one agent, or the single request of a pasted document."""

    name: str
    starts_s: float
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything there is; lengths are tokens, times are seconds."""

    agents: int = 10
    documents: int = 24
    turns: tuple[int, int] = (5, 8)
    agent_every_s: float = 4.5
    tool_pause_s: tuple[float, float] = (2.0, 16.0)
    document_tokens: tuple[int, int] = (640, 1216)
    answer_tokens: int = 24
    kinds: tuple[int, ...] = (0, 1, 0, 0, 1, 0, 2, 1, 0, 1, 0, 2)
    compacting: tuple[int, ...] = (3, 8)


@dataclass(frozen=True, slots=True)
class Workload:
    """All sessions of the afternoon."""

    sessions: tuple[Session, ...]

    def in_order(self) -> list[Turn]:
        """Every request in the order of the script's clock, each nominally served in turn."""
        return list(_by_script_time(self.sessions))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(len(turn.token_ids) for session in self.sessions for turn in session.turns)


def build_workload(vocabulary: int, seed: int = 7, scale: Scale | None = None) -> Workload:
    """The workload for a model of ``vocabulary`` tokens; the same arguments give the same one."""
    scale = scale or Scale()
    writer = Writer(np.random.default_rng(seed), vocabulary)
    prompts = system_prompts(writer, kinds=max(scale.kinds) + 1)
    agents = [_agent(writer, scale, prompts, i) for i in range(scale.agents)]
    span_s = scale.agents * scale.agent_every_s
    documents = [_document(writer, scale, i, span_s) for i in range(scale.documents)]
    return Workload(tuple(sorted([*agents, *documents], key=lambda s: s.starts_s)))


@dataclass
class Writer:
    """Writes spans of random tokens."""

    random: np.random.Generator
    vocabulary: int

    def span(self, layer: SourceLayer, low: int, high: int | None = None) -> Span:
        """Between ``low`` and ``high`` tokens; ids stay clear of the special ones at both ends."""
        length = low if high is None else int(self.random.integers(low, high + 1))
        first, last = self.vocabulary // 8, self.vocabulary * 7 // 8
        return Span(layer, tuple(int(t) for t in self.random.integers(first, last, length)))

    def seconds(self, bounds: tuple[float, float]) -> float:
        """A log-uniform duration: most pauses are short, some are long."""
        low, high = np.log(bounds)
        return float(np.exp(self.random.uniform(low, high)))


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


def _agent(writer: Writer, scale: Scale, prompts: list[tuple[Span, ...]], index: int) -> Session:
    """A session whose prompt grows by the scripted answer, a tool's result and a question."""
    name, kind = f"agent-{index}", scale.kinds[index % len(scale.kinds)]
    head = (
        *prompts[kind],
        writer.span(SourceLayer.CONTEXT, 160, 288),
        writer.span(SourceLayer.MEMORIES, 64, 128),
    )
    count = int(writer.random.integers(scale.turns[0], scale.turns[1] + 1))
    pauses = [0.0, *(writer.seconds(scale.tool_pause_s) for _ in range(count - 1))]
    history: tuple[Span, ...] = ()
    turns: list[Turn] = []
    for number in range(count):
        if index in scale.compacting and number == count - 2:
            history = (writer.span(SourceLayer.MEMORIES, 96),)  # the summary replaces it all
        if number:
            history += (writer.span(SourceLayer.TOOL_RESULT, 96, 256),)
        history += (writer.span(SourceLayer.USER_TURN, 32, 80),)
        hints = _signals(name, pauses[number + 1] if number + 1 < count else None)
        turns.append(Turn(name, number, head + history, scale.answer_tokens, pauses[number], hints))
        history += (writer.span(SourceLayer.GENERATION, scale.answer_tokens),)
    return Session(name, index * scale.agent_every_s, tuple(turns))


def _signals(session: str, next_pause_s: float | None) -> dict[str, Any]:
    """What an agent's harness knows when a turn is over; of a pause it knows only the magnitude."""
    if next_pause_s is None:
        return {"session": session, "session_ended": True}
    expected = 4.0 if next_pause_s < 6.0 else 12.0
    return {"session": session, "waiting_for_tool": True, "expected_return_s": expected}


def _document(writer: Writer, scale: Scale, index: int, span_s: float) -> Session:
    """One pasted document. Two callers of three say that it is one-shot; the third says nothing."""
    name = f"document-{index}"
    prompt = (
        writer.span(SourceLayer.USER_TURN, 24),
        writer.span(SourceLayer.TOOL_RESULT, *scale.document_tokens),
    )
    hints = None if index % 3 == 2 else {"session": name, "session_ended": True}
    turn = Turn(name, 0, prompt, scale.answer_tokens, 0.0, hints)
    starts = float(writer.random.uniform(0.05, 1.0)) * span_s
    return Session(name, starts, (turn,))


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
