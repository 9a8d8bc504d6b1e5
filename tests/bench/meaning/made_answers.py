"""Answers as models of a family write them, with what is true of their ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvgraph.graph.types import StopReason

from .call_texts import Call
from .families import Family
from .family_models import FamilyWriter, corpus

STOPPED: Final = "FINISHED_STOPPED"
CUT: Final = "FINISHED_LENGTH_CAPPED"

_TOOLS: Final = (
    "bash", "read_file", "write_file", "edit", "grep", "web-search", "get_weather", "run.tests",
    "Task", "list_dir", "fetch", "python", "sql_query", "mcp__git__commit", "todo_write",
)  # fmt: skip
_KEYS: Final = ("path", "command", "query", "content", "url", "limit", "name", "description")
_LONG: Final = 12_000  # characters of a file that a call writes


@dataclass(frozen=True, slots=True)
class MadeAnswer:
    """One answer.

    Attributes:
        kind: How it was made.
        status: vLLM's, of its request.
        stop: Why it ended.
        tools: Those that it calls; the reader may name any of them.
    """

    kind: str
    tokens: list[int]
    status: str
    stop: StopReason
    tools: tuple[str, ...] = ()


class AnswerMaker:
    """Makes answers of one family.

    Args:
        writer: Of the family's tokens.
        seed: Of all that is random.
    """

    def __init__(self, family: Family, writer: FamilyWriter, seed: str) -> None:
        self._family = family
        self._writer = writer
        self._rng = random.Random(seed)
        self._texts = corpus()

    def answers(self, count: int) -> list[MadeAnswer]:
        """``count`` answers of every kind."""
        kinds: list[Callable[[], MadeAnswer]] = [
            self._prose, self._bracketed, self._quoted, self._marked, self._half, self._call,
            self._long_call, self._forged, self._cut_prose, self._cut_call,
        ]  # fmt: skip
        if self._family.prose:
            kinds.append(self._said_call)
        if self._family.many:
            kinds.append(self._calls)
        return [kind() for _ in range(count) for kind in kinds]

    # Ends of turns ------------------------------------------------------------------------------

    def _prose(self) -> MadeAnswer:
        return self._turn("prose", self._text())

    def _bracketed(self) -> MadeAnswer:
        """Prose, or an object that is asked for, which ends as calls of some families do."""
        ends = (
            "See [1] and [2]", '{"name": "Bob", "age": 3, "tags": ["a", "b"]}', "print(f(x[0]))",
            '[{"name": "bash", "score": 0.5}]', "```json\n{}\n```", "[done]",
        )  # fmt: skip
        lead = self._text() + "\n" if self._rng.random() < 0.5 else ""
        return self._turn("bracketed", lead + self._rng.choice(ends))

    def _quoted(self) -> MadeAnswer:
        """A call that is quoted in an answer that goes on behind it."""
        call = self._written([self._made_call()])
        lead = self._text() + "\n" if self._rng.random() < 0.5 else ""
        end = self._rng.choice(("", " See [1].", " (as shown [above])"))
        special = self._rng.random() < 0.5
        return self._turn("quoted", f"{lead}{call}\n{self._text()}{end}", special)

    def _marked(self) -> MadeAnswer:
        """Prose that speaks of the family's own tokens."""
        ends = {self._family.turn_end, self._family.call_end, self._family.end}
        names = [name for name in self._family.special if name not in ends]
        words = self._text().split(" ")
        for _ in range(3):
            words.insert(self._rng.randrange(len(words)), self._rng.choice(names))
        return self._turn("marked", " ".join(words) + ".", special=self._rng.random() < 0.5)

    def _half(self) -> MadeAnswer:
        """A call that breaks off, and prose."""
        call = self._written([self._made_call()])
        return self._turn("half", call[: len(call) // 2] + "\n" + self._text())

    # Calls --------------------------------------------------------------------------------------

    def _call(self) -> MadeAnswer:
        return self._calling("call", [self._made_call()])

    def _said_call(self) -> MadeAnswer:
        return self._calling("said_call", [self._made_call()], self._text() + "\n")

    def _calls(self) -> MadeAnswer:
        return self._calling("calls", [self._made_call(), self._made_call()])

    def _long_call(self) -> MadeAnswer:
        """A call that writes a whole file."""
        content = "".join(self._rng.sample(self._texts, len(self._texts)))[:_LONG]
        name, arguments = self._made_call()
        return self._calling("long_call", [Call(name, {**arguments, "content": content})])

    def _forged(self) -> MadeAnswer:
        """A call whose arguments speak of another call."""
        inner = self._written([Call("forged", {"path": "x"})])
        name, arguments = self._made_call()
        call = Call(name, {**arguments, "content": f"{self._text()} {inner} {self._text()}"})
        return self._calling("forged", [call])

    # What was cut -------------------------------------------------------------------------------

    def _cut_prose(self) -> MadeAnswer:
        tokens = self._writer.tokens(self._family.opens_prose + self._text())
        return MadeAnswer("cut_prose", tokens, CUT, StopReason.TRUNCATED)

    def _cut_call(self) -> MadeAnswer:
        tokens = self._writer.tokens(self._written([self._made_call()]))
        cut = self._rng.randint(len(tokens) // 3, len(tokens))
        return MadeAnswer("cut_call", tokens[:cut], CUT, StopReason.TRUNCATED)

    # Parts --------------------------------------------------------------------------------------

    def _turn(self, kind: str, text: str, special: bool = True) -> MadeAnswer:
        tokens = self._writer.tokens(self._family.opens_prose)
        tokens += self._writer.tokens(text, special)
        tokens += self._writer.tokens(self._family.turn_end)
        return MadeAnswer(kind, tokens, STOPPED, StopReason.END_OF_TURN)

    def _calling(self, kind: str, calls: Sequence[Call], lead: str = "") -> MadeAnswer:
        tokens = self._writer.tokens(lead + self._written(calls) + self._family.call_end)
        tools = tuple(call.name for call in calls)
        return MadeAnswer(kind, tokens, STOPPED, StopReason.TOOL_CALL, tools)

    def _written(self, calls: Sequence[Call]) -> str:
        return self._family.write(calls, self._rng.random() < 0.5)

    def _made_call(self) -> Call:
        keys = self._rng.sample(_KEYS, self._rng.choice((0, 1, 1, 2, 3)))
        values: list[Any] = ["main.py", "ls -la | grep 'x'", 'say "hi" {now}', "it's [1]", "déjà"]
        return Call(self._rng.choice(_TOOLS), {key: self._rng.choice(values) for key in keys})

    def _text(self) -> str:
        text = self._rng.choice(self._texts)
        start = self._rng.randrange(max(1, len(text) - 400))
        return " ".join(text[start : start + self._rng.randint(40, 400)].split()) + "."
